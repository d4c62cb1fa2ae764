from hybrid_grpo.records.charts.charts import CHARTS, STEP_PARTS, charts_of
from hybrid_grpo.records.metrics.catalogue import CATALOGUE


def test_charts_show_metrics_of_the_catalogue():
    charts = [chart for members in CHARTS.values() for chart in members]
    shown = {name for chart in charts for name in (*chart["metrics"], chart.get("band")) if name}
    assert shown | {f"time/{part}_s" for part in STEP_PARTS} <= {metric.name for metric in CATALOGUE}
    assert "time/reference_s" in shown, "what streaming the reference costs has a chart of its own"


def test_rewards_are_compared_where_there_are_several():
    title = next(chart["title"] for chart in CHARTS["Rewards"] if chart.get("compared"))
    names = ["reward/mean", "reward/std", "eval/proxy/reward_mean", "eval/true/reward_mean"]
    (chart,) = [chart for chart in charts_of(names) if chart.title == title]
    assert [curve.label for curve in chart.curves] == ["reward", "proxy", "true"]
    assert title not in {chart.title for chart in charts_of(names[:2])}, "nothing to compare"
    assert [(chart.title, chart.band) for chart in charts_of(names) if chart.band] == [("Reward", "reward/std")]
    assert [chart.band for chart in charts_of(names[:1])] == [None]


def test_the_accuracy_of_the_first_set_has_a_band_of_its_standard_error():
    names = ["eval/hard/accuracy", "eval/hard/stderr", "eval/easy/accuracy", "eval/easy/stderr"]
    (chart,) = charts_of(names)
    assert [curve.label for curve in chart.curves] == ["hard", "easy"] and chart.band == "eval/hard/stderr"
    assert charts_of(["eval/hard/accuracy", "eval/easy/stderr"])[0].band is None
