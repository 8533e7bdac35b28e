// Curves of all selected runs, one figure per metric.

import { colourOf, h, note } from "./dom.js";
import { lineChart } from "./chart.js";

const FIRST = ["reward", "eval", "groups", "roles", "learner", "staleness", "other", "time"];
const OPEN = new Set(["reward", "eval", "groups", "roles", "learner", "other"]);

export function curvesView(page) {
  const loaded = new Map();  // run -> {stamp, metrics}
  const charts = new Map();  // metric -> its figure, which keeps its zoom and axis
  const closed = new Map();  // group -> whether a person opened or closed it
  const box = h("div");
  const end = h("div");
  let laidOut = "";  // which metrics are in the box
  const search = h("input", {
    type: "search", placeholder: "metrics whose name holds …", "aria-label": "filter metrics", value: page.state.metric ?? "",
    input: (event) => page.go({ metric: event.target.value }),
  });
  const smooth = h("input", {
    type: "range", min: 0, max: 0.95, step: 0.05, value: page.state.smooth ?? 0, "aria-label": "smoothing",
    input: (event) => page.go({ smooth: Number(event.target.value) ? event.target.value : "" }),
  });
  const node = h("section", { "aria-label": "Curves" },
    h("div", { class: "bar" }, search, h("label", { class: "inline" }, "smoothing ", smooth)), box, end);

  async function update() {
    const runs = page.shown().filter((run) => run.has.metrics);
    await Promise.all(runs.map(async (run) => {
      if (loaded.get(run.id)?.stamp === run.stamp) return;
      loaded.set(run.id, { stamp: run.stamp, ...(await page.source.view(run.id, "metrics")) });
    }));
    const names = new Set(runs.flatMap((run) => Object.keys(loaded.get(run.id).series)));
    const wanted = [...names].filter((name) => !isWidth(name) && name.includes(page.state.metric ?? ""));
    if (!wanted.length) {
      laidOut = "";
      end.replaceChildren();
      box.replaceChildren(note(runs.length ? "No metric has this name." : "No step is finished yet. Curves appear after the first step."));
      return;
    }
    const thinned = Math.max(...runs.map((run) => loaded.get(run.id).every));
    end.replaceChildren(thinned > 1 ? note(`Long runs are thinned: of ${thinned} steps one value of each metric is drawn.`) : "");
    const asked = JSON.stringify([page.state.metric, wanted]);
    if (laidOut !== asked) layOut(wanted);
    laidOut = asked;
    for (const [name, chart] of charts) if (chart.node.isConnected) chart.show(series(name, runs));
  }

  function layOut(names) {
    const groups = new Map();
    for (const name of names) {
      const group = name.includes("/") ? name.split("/")[0] : "other";
      groups.set(group, [...(groups.get(group) ?? []), name]);
    }
    const place = (group) => (FIRST.includes(group) ? FIRST.indexOf(group) : FIRST.indexOf("other") - 0.5);
    const ordered = [...groups].sort(([a], [b]) => place(a) - place(b) || a.localeCompare(b));
    box.replaceChildren(...ordered.map(([group, metrics]) => section(group, metrics)));
  }

  function section(group, metrics) {
    const grid = h("div", { class: "charts" });
    const open = page.state.metric ? true : closed.get(group) ?? OPEN.has(group);
    const fill = () => { if (!grid.children.length) grid.append(...metrics.map(chart)); };
    if (open) fill();
    return h("details", {
      open, toggle: (event) => { if (event.target.open) fill(); closed.set(group, event.target.open); },
    }, h("summary", {}, `${group} (${metrics.length})`), grid);
  }

  function chart(name) {
    if (!charts.has(name)) charts.set(name, lineChart(name));
    return charts.get(name).show(series(name, shown()));
  }

  function shown() {
    return page.shown().filter((run) => run.has.metrics && loaded.has(run.id));
  }

  function series(name, runs) {
    const decay = Number(page.state.smooth ?? 0);
    return runs.filter((run) => loaded.get(run.id).series[name]).map((run) => {
      const { step, series: found } = loaded.get(run.id);
      return {
        name: run.name, colour: colourOf(run.id), dashed: run.id >= 8, x: step, y: decay ? smoothed(found[name], decay) : found[name],
        band: decay ? undefined : found[widthOf(name)], faint: decay ? found[name] : undefined,
      };
    });
  }

  return { node, update };
}

// Half-widths of confidence intervals are drawn around their means.
const WIDTHS = { "reward/mean": "reward/ci", "eval/reward": "eval/ci", "eval/env_reward": "eval/env_ci" };

function widthOf(name) {
  return WIDTHS[name] ?? (name.startsWith("reward/") ? name.replace("reward/", "reward_ci/") : "");
}

function isWidth(name) {
  return Object.values(WIDTHS).includes(name) || name.startsWith("reward_ci/");
}

// Exponential moving average, corrected for its start.
export function smoothed(values, decay) {
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = decay * sum + (1 - decay) * value;
    weight = decay * weight + (1 - decay);
    return sum / weight;
  });
}
