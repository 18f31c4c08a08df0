"""Stores that an earlier commit wrote under a framework are resumed as they lie.

`python tests/integrations/fits.py FOLDER 1 stateful:raise:5:left` writes one, FOLDER/stateful:raise:5:left/store, and
accelerate_loops.py that of shuffled-seedable-stateful:batch:6:left, titans.py of titan:update:8:left and trainers.py of
hf:step:10:left. The newest checkpoint of each is here, as 0.1.0 wrote it before Lightning's records said what metrics
had counted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from lives import assert_alike, begun, lasting, order, run, told

HERE = Path(__file__).parent
# Of each framework: the training, its kind, and how many steps were done when it ended.
LEFT = {
    "accelerate": ("accelerate_loops.py", "shuffled-seedable-stateful", 6),
    "lightning": ("fits.py", "stateful", 5),
    "torchtitan": ("titans.py", "titan", 7),
    "transformers": ("trainers.py", "hf", 10),
}


@pytest.mark.parametrize("framework", LEFT)
def test_a_store_of_an_earlier_commit_is_resumed(framework: str, tmp_path: Path) -> None:
    """Batches, counts and generators are those of a training that was never interrupted; another processor's arithmetic
    may have the last bits of weights otherwise.
    """
    pytest.importorskip(framework, reason=f"{framework} is not installed: pip install 'checkflow[{framework}]'")
    script, kind, done = LEFT[framework]
    resumed, whole = f"{kind}:never:0", f"{kind}:plain:0"
    shutil.copytree(HERE / "version_1" / framework, tmp_path / resumed / "store")
    run(HERE / script, tmp_path, resumed, whole)
    assert_alike(lasting(told(tmp_path, resumed)), lasting(told(tmp_path, whole)))
    assert [line for line in order(tmp_path, whole) if int(line.split()[0]) > done] == order(tmp_path, resumed)
    assert str(done) not in begun(tmp_path, resumed)
