"""Containers of a pod's manifest without Kubernetes: their commands, users, rights and mounts, on this machine.

A namespace of mounts has the container's volumes; the root file system is read-only in it, and everything else is this
machine's: the image is not tried here.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Manifest = Mapping[str, Any]
_MADE_ANEW = ("/run", "/var/lib", "/dev/shm", "/tmp")
"""Folders in which volumes may be mounted wherever they like: nothing that a container needs is in them here."""


class Pod:
    """One pod.

    Args:
        spec: its `spec`, as in a manifest.
        volumes: a folder of this machine for each of its volumes.
        fields: what `fieldRef` gives, by path.
    """

    def __init__(self, spec: Manifest, volumes: Mapping[str, Path], fields: Mapping[str, str]) -> None:
        self._spec = spec
        self._volumes = volumes
        self._fields = fields

    def start_ups(self) -> list[Manifest]:
        """Containers that run to their end, in order, before others start."""
        return [one for one in self._spec.get("initContainers", []) if one.get("restartPolicy") != "Always"]

    def container(self, name: str) -> Manifest:
        """One by its name, a sidecar too."""
        every = [*self._spec.get("initContainers", []), *self._spec["containers"]]
        (found,) = (one for one in every if one["name"] == name)
        return found

    def popen(self, container: Manifest, command: Sequence[str] = (), **environment: str) -> subprocess.Popen[str]:
        """Run a container's command, or another in its place; its pid is the command's."""
        expanded = {one["name"]: self._value(one) for one in container.get("env", [])}
        said = list(command) or [*container["command"], *(container.get("args") or [])]
        for name, value in expanded.items():
            said = [word.replace(f"$({name})", value) for word in said]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-euc", self._script(container, said)],
            env={"PATH": path, "HOME": "/tmp", "OMP_NUM_THREADS": "1"} | expanded | environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, container: Manifest, command: Sequence[str] = (), timeout_s: float = 120.0, **environment: str
            ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """The same, to its end."""
        with self.popen(container, command, **environment) as process:
            try:
                said, _ = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
            return subprocess.CompletedProcess(process.args, process.returncode, said)

    def _value(self, variable: Manifest) -> str:
        if "value" in variable:
            return str(variable["value"])
        return self._fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]

    def _script(self, container: Manifest, command: Sequence[str]) -> str:
        lines = ["mount -t tmpfs none /mnt"]
        mounts = container.get("volumeMounts", [])
        for n, mount in enumerate(mounts):  # below a folder that stays, while those of the volumes are covered
            lines += [f"mkdir /mnt/{n}", f"mount --bind {self._volumes[mount['name']]} /mnt/{n}"]
        lines += [f"mount -t tmpfs none {folder}" for folder in _MADE_ANEW]
        for n, mount in enumerate(mounts):
            place = mount["mountPath"]
            lines += [f"mkdir -p {place}", f"mount --bind /mnt/{n} {place}"]
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {place}")
        places = {mount["mountPath"] for mount in mounts}
        security = {**self._spec.get("securityContext", {}), **container.get("securityContext", {})}
        if security.get("readOnlyRootFilesystem"):
            lines += [
                "mount -o remount,bind,ro /",
                *(f"mount -o remount,bind,ro {one}" for one in _MADE_ANEW if one not in places),
            ]
        user, group = security["runAsUser"], security.get("runAsGroup", security["runAsUser"])
        rights = [f"+{one.lower()}" for one in security.get("capabilities", {}).get("add", [])]
        # Python may be below a folder of root's on this machine; in an image it is not.
        to_read = [] if user == 0 else ["+dac_read_search"]
        given = ",".join(["-all", *rights, *to_read])
        words = [
            "setpriv", "--reuid", str(user), "--regid", str(group),
            f"--groups={security['fsGroup']}" if "fsGroup" in security else "--clear-groups",
            "--bounding-set", given, "--inh-caps", given, "--ambient-caps", given, "--no-new-privs",
        ]  # fmt: skip
        return "\n".join([*lines, f"exec {shlex.join(words)} {shlex.join(command)}"])
