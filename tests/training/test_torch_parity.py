"""Thirty steps of training give PyTorch's losses, stored by benchmarks/torch_parity.py --out."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_thirty_steps_follow_pytorch(golden_dir):
    parity = runpy.run_path(str(ROOT / "benchmarks" / "torch_parity.py"))
    stored = json.loads((golden_dir / "torch_parity.json").read_text())
    case = golden_dir / "base"
    ids = parity["tokens"](parity["settings_for"](case).model.vocab_size, stored["steps"])
    np.testing.assert_allclose(parity["our_losses"](case, ids), stored["losses"], rtol=0, atol=1e-4)
