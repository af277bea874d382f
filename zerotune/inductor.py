"""Measured times for torch inductor's overlap scheduling and bucketing.

```python
import torch._inductor.config as inductor
import zerotune.inductor

options = inductor.aten_distributed_optimizations
options.enable_overlap_scheduling = True
options.custom_runtime_estimation = zerotune.inductor.runtime_estimation()
```
"""

from zerotune.tuner.inductor.runtime_estimation import RuntimeEstimation, runtime_estimation

__all__ = ["RuntimeEstimation", "runtime_estimation"]
