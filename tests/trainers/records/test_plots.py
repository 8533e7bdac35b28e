from matplotlib import rc_context
from matplotlib.figure import Figure

from forge_trainers.records.plots import draw_arms, draw_curve, picture


def test_an_arm_is_its_seeds_and_their_mean(tmp_path, monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    arms = {"ours": [[(0, 0.0), (5, 1.0)], [(0, 1.0), (5, 3.0)]], "control": [[(0, 2.0), (2, 2.0)]]}
    draw_arms(arms, tmp_path / "arms.png", title="t", value="reward")
    (axes,) = drawn[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["ours"] == [[0.0, 0.5], [5.0, 2.0]]
    assert lines["control"] == [[0.0, 2.0], [2.0, 2.0]]
    assert len(axes.lines) == 5 and axes.get_ylabel() == "reward"
    assert (tmp_path / "arms.png").stat().st_size > 1000


def test_unknown_interval_is_a_gap_and_not_an_interval_of_no_width():
    axes = Figure().subplots()
    widths = (0.1, 0.1, None, 0.1, 0.1)
    rows = [{"step": step, "reward": 0.5, "ci": width} for step, width in enumerate(widths)]
    draw_curve(axes, rows, "reward", "ci", label="reward")
    assert axes.lines[0].get_xdata().tolist() == [0, 1, 2, 3, 4]
    (shade,) = axes.collections
    assert {x for path in shade.get_paths() for x, _ in path.vertices} == {0.0, 1.0, 3.0, 4.0}


def test_settings_of_matplotlib_and_dollar_signs_change_no_picture(tmp_path):
    def drawn():
        draw_arms({r"$\frac{$": [[(0, 0.0), (5, 1.0)]]}, tmp_path / "arms.png", title="$_$", value="reward")
        return (tmp_path / "arms.png").read_bytes()

    plain = drawn()
    with rc_context({"text.usetex": True, "lines.linewidth": 1e9, "savefig.pad_inches": 150}):  # as of a matplotlibrc
        assert drawn() == plain


def test_steps_have_whole_numbers(tmp_path):
    for steps in (1, 2, 5):
        with picture(tmp_path / "reward.png", xlabel="step") as axes:
            draw_curve(axes, [{"step": step, "x": 0.5} for step in range(1, steps + 1)], "x", "ci", label="x")
        assert all(tick == int(tick) for tick in axes.get_xticks())
