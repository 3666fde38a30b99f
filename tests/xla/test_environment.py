"""What the other tests here stand on: the working pair, and programs with virtual devices."""

from support.states import xla


def test_a_program_sees_its_virtual_devices(devices: int) -> None:
    def program() -> None:
        import os

        import torch
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr

        xr.use_spmd()
        number = int(os.environ["CPU_NUM_DEVICES"])
        assert xr.global_runtime_device_count() == number
        mesh = xs.Mesh(range(number), (number,), ("data",))
        tensor = torch.arange(2 * number).reshape(number, 2).to("xla")
        sharded = xs.mark_sharding(tensor, mesh, ("data", None))
        assert [tuple(shard.data.shape) for shard in sharded.local_shards] == [(1, 2)] * number
        assert sharded.global_tensor.cpu().sum().item() == number * (2 * number - 1)
        print("seen")

    assert "seen" in xla.run_program(program, devices).outputs[0]


def test_checks_share_a_process_and_fail_by_name() -> None:
    def passes() -> None:
        import torch_xla.runtime as xr

        assert xr.is_spmd()

    def fails() -> None:
        raise AssertionError("on purpose")

    assert xla.run_checks([passes, fails], 1) == {"passes"}
