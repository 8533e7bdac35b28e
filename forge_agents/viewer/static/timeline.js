// Timeline of a run: stages of each step, and idle times of engines and learner.

import { h, note, number, seconds } from "./dom.js";
import { figure, paint } from "./chart.js";

const WHO = { evaluate: "held-out episodes", save: "checkpoint of the step before", collect: "engines and environments", score: "reward and verifiers", resample: "groups resampled by dynamic sampling", learn: "learners", sync: "weights to engines" };
const PARTS = { collect: "engines", learn: "learner" };  // of idle/PART, a share of the step
const LANE = 40;  // pixels

export function timelineView(page) {
  const summary = h("div");
  const place = h("div");
  let drawing = null;
  let drawn = "";  // of which run, and which stages
  const node = h("section", { "aria-label": "Timeline" }, summary, place);

  async function update() {
    const run = page.run();
    const found = run?.has.metrics ? await page.source.view(run.id, "metrics") : null;
    const total = found?.series["time/step_s"];
    if (!total?.some((value) => value !== null)) {
      summary.replaceChildren(note("This run has logged no times: they come with each step of GRPO training."));
      place.replaceChildren();
      drawn = "";
      return;
    }
    const settings = await page.source.view(run.id, "settings");
    const ahead = Number(settings.trainer?.max_staleness ?? 0);
    const stages = Object.keys(found.series).filter((name) => /^time\/.+_s$/.test(name) && name !== "time/step_s").map((name) => name.slice(5, -2));
    const between = ["save", "evaluate"];  // not in every step, and first in those
    stages.sort((one, other) => between.indexOf(other) - between.indexOf(one));
    const steps = found.step.map((step, i) => ({
      step, total: total[i], spent: Object.fromEntries(stages.map((stage) => [stage, found.series[`time/${stage}_s`][i] ?? 0])),
      idle: Object.fromEntries(stages.map((stage) => [stage, found.series[`idle/${PARTS[stage]}`]?.[i] ?? null])),
    })).filter((_, i) => total[i] !== null);  // a thinned run has some values of other steps
    summary.replaceChildren(totals(stages, steps, ahead), found.every > 1 ? note(`One step in ${found.every} is counted and drawn.`) : "");
    const wanted = JSON.stringify([run.id, stages]);
    if (drawn !== wanted) {  // else it stays where it is, zoomed as it is
      drawing = figure("stages of each step", { height: stages.length * LANE + 32 });
      place.replaceChildren(drawing.node);
      drawn = wanted;
    }
    drawing.show(() => bars(stages, steps, ahead));
  }

  return { node, update };
}

function totals(stages, steps, ahead) {
  const all = steps.reduce((sum, step) => sum + step.total, 0);
  const rows = stages.map((stage) => {
    const busy = steps.reduce((sum, step) => sum + (step.idle[stage] === null ? step.spent[stage] : (1 - step.idle[stage]) * step.total), 0);
    return h("tr", {}, h("th", { scope: "row" }, WHO[stage] ?? stage), h("td", { class: "text" }, stage), h("td", {}, seconds(busy)),
      h("td", {}, h("span", { class: "meter", vars: { "--share": `${Math.min(100, busy / all * 100)}%` } }), ` ${number(busy / all * 100, 3)} %`),
      h("td", {}, seconds(Math.max(0, all - busy))));
  });
  return h("div", {}, h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["process", "stage", "busy", "fraction", "idle"].map((name, at) => h("th", { scope: "col", class: at < 2 ? "text" : undefined }, name)))), h("tbody", {}, rows))),
  note(`${number(steps.length)} steps took ${seconds(all)}, ${seconds(all / steps.length)} each. ${ahead
    ? `Rollouts are asynchronous, up to ${ahead} step${ahead > 1 ? "s" : ""} ahead: time/collect_s is how long the learner waited for episodes.`
    : "Stages run one after the other. Asynchronous rollouts (max_staleness=1) overlap them."} Engines and learner are busy while they have work (idle/engines, idle/learner), if that was logged. A checkpoint and an evaluation count in the step after them, during whose collection the evaluation runs. Those after the last step are not counted.`));
}

// Bars by stage over the seconds of all steps. Its data have a point at each step's start, and one at the end.
function bars(stages, steps, ahead) {
  const names = stages.map((stage) => (ahead && stage === "collect" ? "wait for episodes" : WHO[stage] ?? stage));
  const starts = [0];
  for (const step of steps) starts.push(starts.at(-1) + step.total);
  const colour = (place) => `var(--run-${place % 8})`;
  const within = (min, max) => starts.slice(0, -1).filter((start) => start >= min && start <= max);

  function draw(plot) {
    const { ctx, bbox } = plot;
    const toX = (time) => plot.valToPos(time, "x", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const lane = bbox.height / stages.length;
    ctx.fillStyle = paint("var(--soft)");
    stages.forEach((_, place) => ctx.fillRect(bbox.left, bbox.top + (place + 0.12) * lane, bbox.width, 0.76 * lane));
    steps.forEach((step, i) => {
      let at = starts[i];
      stages.forEach((stage, place) => {
        const [from, to] = [toX(at), toX(at + step.spent[stage])];
        ctx.fillStyle = paint(colour(place));
        ctx.fillRect(from, bbox.top + (place + 0.12) * lane, Math.max(0.7, to - from - 0.5), 0.76 * lane);
        at += step.spent[stage];
      });
    });
    ctx.restore();
  }

  function told(plot) {
    const step = steps[Math.min(plot.cursor.idx, steps.length - 1)];
    return [h("b", {}, `step ${number(step.step)}, ${seconds(step.total)}`), ...stages.map((stage, place) =>
      h("span", {}, h("i", { vars: { "--colour": colour(place) } }), `${names[place]} ${seconds(step.spent[stage])}, ${number(step.spent[stage] / step.total * 100, 3)} %`))];
  }

  const options = {
    series: [{}, { paths: () => null, points: { show: false } }],
    scales: { x: { time: false }, y: { range: [0, stages.length], dir: -1 } },
    axes: [
      { grid: { show: true }, splits: (plot, _, min, max) => spaced(within(min, max), (time) => plot.valToPos(time, "x"), 60), values: (_, at) => at.map((time) => `step ${steps[starts.indexOf(time)].step}`) },
      { size: 170, grid: { show: false }, splits: () => stages.map((_, place) => place + 0.5), values: () => names },
    ],
    cursor: { dataIdx: (plot, _, closest, time) => (starts[closest] > time ? Math.max(0, closest - 1) : closest) },
    hooks: { draw: [draw] },
  };
  return {
    options, told, data: [starts, starts.map(() => 0)], legend: [],
    summary: `${names.join(", ")} in steps ${steps[0].step} to ${steps.at(-1).step}`,
    table: () => [["step", "seconds", ...names], ...steps.map((step) => [step.step, step.total, ...stages.map((stage) => step.spent[stage])])],
  };
}

// Those that are drawn at least `apart` from the one before.
function spaced(values, toX, apart) {
  let last = -Infinity;
  return values.filter((value) => toX(value) - last >= apart && ((last = toX(value)), true));
}
