"""docs/tpu.md, as a reader would type it, on virtual devices."""

import re
import signal
import textwrap
from pathlib import Path

from support.network.status_pages import until
from support.processes.daemons import Daemons
from support.states import xla

PAGE = (Path(__file__).parents[2] / "docs/tpu.md").read_text()


def block(opening: str) -> str:
    blocks = re.findall(r"```\w+\n(.*?)```", PAGE, re.DOTALL)
    (found,) = [block for block in blocks if opening in block]
    return str(found)


def training(root: Path) -> str:
    script = block("# train_xla.py")
    assert "/tmp/checkpoints" in script
    return script.replace("/tmp/checkpoints", str(root))


def on_several_hosts(script: str) -> str:
    """With the line for them, which is a comment."""
    changed = script.replace("\n# dist.init_process_group(", "\ndist.init_process_group(")
    assert changed != script
    return changed


def test_the_environment_of_the_page_is_the_tested_one() -> None:
    console = block("pip install")
    assert "pip install '.[xla,gcs]'" in console
    assert "PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python train_xla.py" in console
    assert xla.environment(4) == {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}


TELL = """
import hashlib
import torch_xla
for tensor in model[0].weight, optimizer.state_dict()["state"][0]["exp_avg"]:
    print("digest", hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest())
print("sharding", torch_xla._XLAC._get_xla_sharding_spec(model[0].weight), flush=True)
"""


def printed(output: str, what: str) -> list[str]:
    return re.findall(rf"^{what} (.*)", output, re.MULTILINE)


def test_training_is_preempted_and_goes_on(tmp_path: Path, embedded: Path) -> None:
    root = tmp_path / "checkpoints"
    slowed = on_several_hosts(training(root)).replace(
        "torch_xla.sync()\n",
        'torch_xla.sync()\n    print("step", step, flush=True)\n    time.sleep(0.2 if step < 3 else 3.0)\n',
    )
    (keep,) = re.findall(r"max_to_keep.*`(PANNIER_JOB=\S+ PANNIER_KEEP_NEWEST=3)`", PAGE)
    settings = dict(each.split("=") for each in keep.split())
    leaving = "        raise SystemExit(143)"
    assert leaving in slowed
    slowed = slowed.replace(leaving, textwrap.indent(TELL, "        ") + leaving)
    with xla.start_program(f"import time\n{slowed}", 4, settings) as program:
        program.wait_for("step 3\n")
        program.processes[0].signal(signal.SIGTERM)
        finished = program.wait(120)
    # What started it is to start it again.
    assert finished.returncodes == [143], finished.outputs
    before = finished.outputs[0]
    (preempted,) = root.glob("step-*/.metadata")
    step = int(preempted.parent.name.removeprefix("step-"))
    assert step < 10

    telling = training(root).replace(
        "notices = []", f'print("goes on after", done)\n{TELL}\nnotices = []'
    )
    after = xla.run_program(telling, 8, settings).outputs[0]
    assert f"goes on after {step}\n" in after
    assert printed(before, "digest") == printed(after, "digest")
    assert printed(before, "sharding") == ["{devices=[4,1]0,1,2,3}"]
    assert printed(after, "sharding") == ["{devices=[8,1]0,1,2,3,4,5,6,7}"]
    # Of the four that were saved.
    kept = {"step-10", "step-20", "step-30"}
    until(lambda: {path.parent.name for path in root.glob("*/.metadata")}, kept.__eq__, 60)


def test_a_notice_to_one_host_stops_all_at_the_same_step(tmp_path: Path, daemons: Daemons) -> None:
    """Here "hosts" are processes with devices and a whole state of their own."""
    root = tmp_path / "checkpoints"
    script = on_several_hosts(training(root)).replace(', init_method="xla://"', "")
    script = script.replace(
        "torch_xla.sync()\n",
        'torch_xla.sync()\n    print("step", step, flush=True)\n    time.sleep(0.2 if step < 3 else 3.0)\n',
    )
    with xla.start_program(f"import time\n{script}", 4, daemons.env(), processes=2) as program:
        program.wait_for("step 3\n")
        program.processes[1].signal(signal.SIGTERM)
        finished = program.wait(120)
        assert finished.returncodes == [143, 143], finished.outputs
        steps = [re.findall(r"^step \d+$", program.output(rank), re.MULTILINE) for rank in range(2)]
        last = [each[-1] for each in steps]
    assert last[0] == last[1]
    assert len(list(root.glob("*/.metadata"))) == 1
