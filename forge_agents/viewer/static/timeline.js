// Where the time of a run went: stages of each step, and how long every part of the machine stood idle.
// In: times in the metrics. Out: a view. Waits for the source.

import { h, note, number, seconds, svg } from "./dom.js";

const WHO = { collect: "engines and environments", judge: "reward and verifiers", learn: "learners", sync: "weights to engines" };
const PARTS = { collect: "engines", learn: "learner" };  // of idle/PART, a share of the step
const SHOWN = 24;  // steps drawn at once
const ACROSS = 960;
const LEFT = 180;

export function timelineView(page) {
  const box = h("div");
  const node = h("section", { "aria-label": "Timeline" }, box);

  async function update() {
    const run = page.run();
    const found = run?.has.metrics ? await page.source.metrics(run.id) : null;
    const total = found?.series["time/step_s"];
    if (!total) {
      box.replaceChildren(note("This run has logged no times: they come with each step of GRPO training."));
      return;
    }
    const settings = await page.source.settings(run.id);
    const ahead = Number(settings.trainer?.max_staleness ?? 0);
    const stages = Object.keys(found.series).filter((name) => /^time\/.+_s$/.test(name) && name !== "time/step_s").map((name) => name.slice(5, -2));
    const steps = found.step.map((step, i) => ({
      step, total: total[i] ?? 0, spent: Object.fromEntries(stages.map((stage) => [stage, found.series[`time/${stage}_s`][i] ?? 0])),
      idle: Object.fromEntries(stages.map((stage) => [stage, found.series[`idle/${PARTS[stage]}`]?.[i] ?? null])),
    }));
    const end = Math.min(steps.length, Math.max(1, Number(page.state.until ?? steps.length)));
    box.replaceChildren(
      totals(stages, steps, ahead), found.every > 1 ? note(`One step in ${found.every} is counted and drawn.`) : "",
      h("label", { class: "inline" }, "up to step ", h("input", {
        type: "range", min: 1, max: steps.length, value: end, input: (event) => page.go({ until: Number(event.target.value) === steps.length ? "" : event.target.value }),
      }), ` ${steps[end - 1].step}`),
      h("div", { class: "scroll" }, drawing(stages, steps.slice(Math.max(0, end - SHOWN), end), ahead)));
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
    h("thead", {}, h("tr", {}, ["who", "stage", "busy", "share", "idle"].map((name, at) => h("th", { scope: "col", class: at < 2 ? "text" : undefined }, name)))), h("tbody", {}, rows))),
  note(`${number(steps.length)} steps took ${seconds(all)}, ${seconds(all / steps.length)} each. ${ahead
    ? `This run plays up to ${ahead} step${ahead > 1 ? "s" : ""} ahead: time/collect_s is how long the learner waited for episodes, while the engines went on playing.`
    : "Stages follow each other, so whoever is not at work stands idle: play a step ahead with max_staleness=1 to overlap them."} Engines and learner are busy while they have work (idle/engines, idle/learner), where that was logged. Evaluations and checkpoints lie between the steps and are not counted.`));
}

function drawing(stages, steps, ahead) {
  const lane = (stage) => ahead && stage === "collect" ? "wait for episodes" : WHO[stage] ?? stage;
  const all = steps.reduce((sum, step) => sum + step.total, 0) || 1;
  const toX = (time) => LEFT + time / all * (ACROSS - LEFT - 8);
  const height = stages.length * 34 + 30;
  const picture = svg("svg", { class: "gantt", viewBox: `0 0 ${ACROSS} ${height}`, role: "img", "aria-label": `stages of steps ${steps[0].step} to ${steps.at(-1).step}` });
  stages.forEach((stage, place) => picture.append(
    svg("rect", { class: "idle", x: LEFT, width: ACROSS - LEFT - 8, y: place * 34 + 4, height: 26, rx: 3 }),
    svg("text", { class: "tick", x: LEFT - 8, y: place * 34 + 21, "text-anchor": "end" }, lane(stage))));
  let start = 0;
  let labelled = -Infinity;
  for (const step of steps) {
    if (toX(start) - labelled > 44 && toX(start) < ACROSS - 50) {
      picture.append(svg("line", { class: "grid", x1: toX(start), x2: toX(start), y1: 0, y2: height - 22 }), svg("text", { class: "tick", x: toX(start) + 2, y: height - 8 }, `step ${step.step}`));
      labelled = toX(start);
    }
    let at = start;
    stages.forEach((stage, place) => {
      const spent = step.spent[stage];
      picture.append(svg("rect", {
        class: "busy", x: toX(at), width: Math.max(0.7, toX(at + spent) - toX(at) - 0.5), y: place * 34 + 4, height: 26, rx: 2, vars: { "--colour": `var(--run-${place % 8})` },
      }, svg("title", {}, `step ${step.step}: ${stage} ${seconds(spent)}, ${number(spent / step.total * 100, 3)} % of the step`)));
      at += spent;
    });
    start += step.total;
  }
  return picture;
}
