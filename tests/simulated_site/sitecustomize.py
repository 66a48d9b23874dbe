"""Makes every Python process with this folder and tests/ on its path one with a simulated CUDA device, and with
references in the place of Triton's kernels. Python imports it as it starts."""

import pytest
import simcuda

simcuda.install()

from simulated_references import without_kernels  # noqa: E402  # torch.cuda is the simulated one from here

without_kernels(pytest.MonkeyPatch())
