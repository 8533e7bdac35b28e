// The page: runs, views, state in the address, and keys. It polls the source every two seconds.

import { colourOf, h, note, number } from "./dom.js";
import { openSource } from "./source.js";
import { repaint } from "./chart.js";
import { curvesView } from "./curves.js";
import { episodesView } from "./episodes.js";
import { timelineView } from "./timeline.js";
import { settingsView, tablesView, verifiersView } from "./tables.js";

const NEWS_MS = 2000;
const VIEWS = {
  curves: ["Curves", curvesView, null],
  episodes: ["Episodes", episodesView, "episodes"],
  timeline: ["Timeline", timelineView, "metrics"],
  verifiers: ["Verifiers", verifiersView, "verifiers"],
  tables: ["League", tablesView, "tables"],
  settings: ["Settings", settingsView, null],
};
const KEYS = [
  ["j, k", "next episode, previous episode"], ["[, ]", "previous page, next page"], ["/", "search"], ["c", "next color of tokens"],
  ["←, →, +, −, 0", "on a chart: previous point, next point, zoom in, zoom out, all"],
  ["1 to 6", "curves, episodes, timeline, verifiers, league, settings"], ["?", "this list"], ["Esc", "leave a field or this list"],
];

const source = openSource();
const page = {
  source,
  state: {},  // what the address says
  runs: [],
  sorts: [],
  shown: () => page.runs.filter((run) => !hidden().has(String(run.id))),
  run: () => page.runs.find((run) => String(run.id) === page.state.run) ?? page.shown().find((run) => fits(run)) ?? page.runs[0],
  go,
};
let view = null;
let viewName = "";

const tabs = h("nav", { "aria-label": "views" });
const side = h("aside", { "aria-label": "runs" });
const main = h("main", {});
const alarm = h("div", { role: "alert" });
const keysHelp = h("dialog", { "aria-label": "keys", class: "keys" }, h("h2", {}, "Keys"),
  h("dl", {}, KEYS.map(([key, does]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, does)))),
  h("form", { method: "dialog" }, h("button", {}, "Close")));

function hidden() {
  return new Set((page.state.hide ?? "").split(",").filter(Boolean));
}

function fits(run) {
  const needs = VIEWS[viewName]?.[2];
  return !needs || run.has[needs];
}

// Change what the address says, then show it.
async function go(changes, { push = false } = {}) {
  const next = Object.fromEntries(Object.entries({ ...page.state, ...changes }).filter(([, value]) => value !== "" && value !== undefined));
  const address = `#${new URLSearchParams(next)}`;
  if (address !== location.hash) history[push ? "pushState" : "replaceState"](null, "", address);
  page.state = next;
  await show("state");
}

function readAddress() {
  page.state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}

async function show(why) {
  const wanted = Object.hasOwn(VIEWS, page.state.view ?? "") ? page.state.view : "curves";
  if (wanted !== viewName || view === null) {
    viewName = wanted;
    view = VIEWS[wanted][1](page);
    main.replaceChildren(runChoice(), view.node);
  }
  if (!main.firstChild.contains(document.activeElement)) main.firstChild.replaceWith(runChoice());
  showTabs();
  if (why === "state" || !side.querySelector("details[open]")) showRuns();  // what a person has opened stays open
  try {
    await view.update(why);
    alarm.replaceChildren();
  } catch (error) {
    alarm.replaceChildren(note(error.message, "problem"));
  }
}

// Of views that show one run at a time.
function runChoice() {
  const possible = page.runs.filter((run) => fits(run));
  if (!VIEWS[viewName][2] || possible.length < 2) return h("div");
  return h("label", { class: "inline runs" }, "run ", h("select", {
    change: (event) => go({ run: event.target.value, n: "", offset: "", env: "", error: "", until: "" }),
  }, possible.map((run) => h("option", { value: String(run.id), selected: run.id === page.run().id }, run.name))));
}

function showTabs() {
  tabs.replaceChildren(...Object.entries(VIEWS).map(([name, [title, , needs]]) => h("a", {
    href: `#view=${name}`, "aria-current": name === viewName ? "page" : undefined,
    class: !needs || page.runs.some((run) => run.has[needs]) ? undefined : "empty",
    click: (event) => { event.preventDefault(); go({ view: name }, { push: true }); },
  }, title)));
}

function showRuns() {
  const off = hidden();
  side.replaceChildren(h("h2", {}, "Runs"), h("ul", {}, page.runs.map((run) => h("li", {}, h("label", { title: run.folder },
    h("input", {
      type: "checkbox", checked: !off.has(String(run.id)),
      change: () => { const set = hidden(); if (!set.delete(String(run.id))) set.add(String(run.id)); go({ hide: [...set].join(",") }); },
    }), h("i", { class: "swatch", vars: { "--colour": colourOf(run.id) } }), h("span", { class: "name" }, run.name)),
  h("small", {}, [run.steps ? `${number(run.steps)} steps` : null, run.episodes.episodes ? `${number(run.episodes.episodes)} episodes` : null,
    run.episodes.indexed < run.episodes.bytes ? `indexed ${Math.floor(run.episodes.indexed / run.episodes.bytes * 100)} %` : null].filter(Boolean).join(" · ") || "nothing logged yet"),
  run.ending ? h("details", { class: "ending" }, h("summary", {}, `ended after step ${number(run.ending.step)}: ${run.ending.kind}`), h("p", {}, run.ending.reason)) : null,
  run.problems.length ? h("details", { class: "problem" }, h("summary", {}, `${run.problems.length} problem${run.problems.length > 1 ? "s" : ""}`), run.problems.map((problem) => h("p", {}, problem))) : null))));
}

async function news() {
  try {
    const found = await source.runs();
    const changed = JSON.stringify(found.runs) !== JSON.stringify(page.runs);
    page.runs = found.runs;
    page.sorts = found.sorts;
    document.title = `${page.runs.map((run) => run.name).join(", ")} · forge_agents`;
    if (changed) await show("news");
    document.body.dataset.ready = "yes";
  } catch (error) {
    alarm.replaceChildren(note(`The viewer does not answer (${error.message}). Is forge-agents view still running?`, "problem"));
  }
  if (source.live) setTimeout(news, NEWS_MS);
}

function typed(event) {
  const field = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape") field?.blur();
  if (field || event.ctrlKey || event.metaKey || event.altKey || keysHelp.open) return;
  const place = Number(event.key) - 1;
  const name = Object.keys(VIEWS)[place];
  const act = event.key === "?" ? () => keysHelp.showModal() : name ? () => go({ view: name }, { push: true }) : view?.keys?.[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

document.getElementById("app").replaceChildren(
  h("header", { class: "top" }, h("strong", {}, "forge_agents"), tabs, h("button", { type: "button", click: () => keysHelp.showModal(), "aria-label": "keys" }, "?")),
  h("div", { class: "body" }, side, h("div", {}, alarm, main)), keysHelp);
readAddress();
document.addEventListener("keydown", typed);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
addEventListener("popstate", () => { readAddress(); show("state"); });
news();
