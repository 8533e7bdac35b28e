// Tables of leagues, benchmarks, verifiers, and settings that differ between runs.

import { colourOf, h, note, number } from "./dom.js";
import { lineChart } from "./chart.js";

export function tablesView(page) {
  const node = h("section", { "aria-label": "Tables" });
  return {
    node,
    async update() {
      const run = page.run();
      const found = run?.has.tables ? await page.source.view(run.id, "tables") : [];
      node.replaceChildren(...(found.length ? found.map(tableNode) : [note("This run has no league and no benchmark.")]));
    },
  };
}

function tableNode(table) {
  return h("section", {}, h("h2", {}, table.title), table.rows.length ? grid(table.heads, table.rows, table.names) : null, table.note ? note(table.note) : null);
}

function grid(heads, rows, names) {
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head, at) => h("th", { scope: "col", class: at < names ? "text" : undefined }, String(head).replaceAll("_", " "))))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, at) => (at === 0
      ? h("th", { scope: "row", dir: "auto" }, cell) : h("td", { class: at < names ? "text" : undefined, dir: "auto" }, cell))))))));
}

const VERIFIER = ["name", "family", "cost", "accuracy", "tpr", "fpr", "weight", "scored", "abstained", "errors", "timeouts"];

export function verifiersView(page) {
  const node = h("section", { "aria-label": "Verifiers" });
  let charts = null;  // they keep their zoom while the run goes on
  let drawn = null;  // whose they are
  return {
    node,
    async update() {
      const run = page.run();
      const found = run?.has.verifiers ? await page.source.view(run.id, "verifiers") : null;
      if (!found?.latest) {
        node.replaceChildren(note("The reward of this run is no ensemble of verifiers, or no step is finished yet."));
        return;
      }
      const { latest, step, series } = found;
      if (drawn !== run.id) charts = { weight: lineChart("weight", { named: true }), accuracy: lineChart("accuracy", { named: true }), effective: lineChart("effective number") };
      drawn = run.id;
      const curve = (what) => charts[what].show(Object.entries(series).filter(([name]) => name.startsWith(`${what}/`)).map(([name, y], at) => (
        { name: name.slice(what.length + 1), colour: colourOf(at), x: step, y })));
      const alarms = latest.alarms ?? [];
      const failed = latest.verifiers.filter((one) => one.last_error);
      node.replaceChildren(
        h("h2", {}, `${latest.name}: what it has learned of its verifiers`),
        alarms.length ? h("section", { class: "problem" }, h("b", {}, "Possible reward hacking"), h("ul", {}, alarms.map((alarm) => h("li", {}, String(alarm))))) : "",
        note(`Combiner ${latest.combiner}, fit ${number(latest.version)}, ${number(latest.window_rows)} rows, share correct ${number(latest.class_balance, 3)}, effective verifiers ${number(latest.effective_number, 3)} of ${latest.verifiers.length}, step ${number(latest.step)}.`),
        grid(VERIFIER, latest.verifiers.map((one) => VERIFIER.map((key) => (typeof one[key] === "number" ? number(one[key], 3) : String(one[key] ?? "–")))), 3),
        failed.length ? h("details", {}, h("summary", {}, "last failures"), h("ul", {}, failed.map((one) => h("li", {}, h("b", {}, one.name), ": ", one.last_error)))) : "",
        h("div", { class: "charts" }, curve("weight"), curve("accuracy"),
          charts.effective.show([{ name: latest.name, colour: colourOf(0), x: step, y: series["effective number"] ?? [] }])),
        page.source.live ? h("p", {}, h("a", { href: `reports/${run.id}/verifiers`, target: "_blank", rel: "noopener" }, "Full report"), ": calibration, correlation.") : "");
    },
  };
}

export function settingsView(page) {
  const node = h("section", { "aria-label": "Settings" });
  const all = h("input", { type: "checkbox", checked: page.state.all === "1", change: (event) => page.go({ all: event.target.checked ? "1" : "" }) });
  return {
    node,
    async update() {
      const runs = page.shown().filter((run) => run.has.settings);
      const settings = await Promise.all(runs.map(async (run) => flat(await page.source.view(run.id, "settings"))));
      const keys = [...new Set(settings.flatMap((one) => Object.keys(one)))];
      const differs = (key) => new Set(settings.map((one) => one[key])).size > 1;
      const chosen = runs.length < 2 || all.checked ? keys : keys.filter(differs);
      node.replaceChildren(
        runs.length > 1 ? h("label", { class: "inline" }, all, " also those that are equal") : "",
        chosen.length ? grid(["setting", ...runs.map((run) => run.name)], chosen.map((key) => [key, ...settings.map((one) => one[key] ?? "–")]), 1 + runs.length)
          : note(runs.length ? "All settings are equal." : "These runs have no settings."));
    },
  };
}

function flat(value, prefix = "") {
  if (value === null || typeof value !== "object") return { [prefix]: String(value) };
  if (Array.isArray(value) && value.every((item) => item === null || typeof item !== "object")) return { [prefix]: value.join(", ") };
  return Object.assign({}, ...Object.entries(value).map(([key, own]) => flat(own, prefix ? `${prefix}.${key}` : key)));
}
