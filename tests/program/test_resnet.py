"""A residual network through the whole program."""

from tests.program.conftest import rows, summary


def test_a_residual_network_trains_and_evaluates(program):
    words = ("network=resnet", "network.stem=4C3", "network.channels=[4,6]", "network.blocks=1")
    ended = program.train("data=synthetic", *words, "device=cpu", "trainer.epochs=1", "hydra.run.dir=run")
    assert ended.code == 0, ended.err
    run = program.folder / "run"
    (row,) = rows(run)
    layers = ["0_4C3"]
    for block in ("1_R4s2", "2_R6s2"):
        layers += [f"{block}.{part}" for part in ("conv1", "conv2", "shortcut")]
    assert [key for key in row if key.startswith("val/spike_rate/")] == [
        f"val/spike_rate/{name}" for name in layers
    ]
    assert all(row[f"val/spike_rate/{name}"] > 0 for name in layers)
    ended = program.evaluate("checkpoint=run")
    assert ended.code == 0, ended.err
    assert f"test/loss {summary(run)['test/loss']:.4f}" in ended.out
    assert f"test/accuracy {summary(run)['test/accuracy']:.4f}" in ended.out
