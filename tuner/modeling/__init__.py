"""What settings cost before they were tried: features, the fitted correction of NCCL's cost, and how it is kept."""
