// The list of stored episodes with search and filters, next to the open episode.

import { h, note, number, plural } from "./dom.js";
import { COLOURS, episodeNode } from "./turns.js";

const FILTERS = ["text", "env", "error", "reward_from", "reward_to", "step_from", "step_to", "sort"];
const PER_PAGE = 50;

/** Text about the trained reward if it differs from the environment's: it is stored in single precision. */
function trainedOn(row) {
  const [trained, paid] = [number(row.trained, 3), number(row.reward, 3)];
  return row.trained === null || trained === paid ? null : `trained on ${trained}`;
}

export function episodesView(page) {
  let rows = [];
  let total = 0;
  let asked = "";  // what the list shows
  let opened = "";  // what the detail shows
  let turn = 0;  // counts requests: an answer that comes late is dropped
  const list = h("ol", { class: "episodes", "aria-label": "episodes" });
  const pager = h("div", { class: "pager" });
  const detail = h("div", { class: "detail", tabindex: "-1", "aria-live": "off" });
  const filters = h("form", { class: "filters", role: "search", submit: (event) => event.preventDefault() });
  const node = h("section", { class: "split", "aria-label": "Episodes" }, h("div", { class: "side" }, filters, list, pager), detail);

  const offset = () => Number(page.state.offset ?? 0);
  const query = () => Object.fromEntries(FILTERS.map((name) => [name, page.state[name] ?? ""]));

  async function update(why) {
    const run = page.run();
    if (!run?.has.episodes) {
      node.replaceChildren(note("This run has no stored episodes yet. keep_episodes in its settings is the number of episodes that training stores per step."));
      return;
    }
    if (node.firstChild?.className !== "side") node.replaceChildren(h("div", { class: "side" }, filters, list, pager), detail);
    const wanted = JSON.stringify([run.id, query(), offset(), run.episodes.indexed]);
    if (wanted !== asked) await loadList(run, wanted, why);
    await loadDetail(run);
  }

  async function loadList(run, wanted, why) {
    const mine = (turn += 1);
    const [found, facets] = await Promise.all([
      page.source.episodes(run.id, { ...query(), offset: offset(), limit: PER_PAGE }),
      why === "state" && filters.children.length && filters.dataset.run === String(run.id) ? null : page.source.view(run.id, "facets"),
    ]);
    if (mine !== turn) return;
    [rows, total, asked] = [found.rows, found.total, wanted];
    if (facets && !filters.contains(document.activeElement)) showFilters(run, facets);
    showList(run);
  }

  function showFilters(run, facets) {
    filters.dataset.run = run.id;
    const set = (name) => (event) => page.go({ [name]: event.target.value, offset: "", n: "" });
    const field = (label, name, more) => h("label", {}, label, h("input", { name, value: page.state[name] ?? "", input: set(name), autocomplete: "off", ...more }));
    const select = (label, name, options) => h("label", {}, label, h("select", { name, change: set(name) },
      options.map(([value, text]) => h("option", { value, selected: value === (page.state[name] ?? "") }, text))));
    const range = (label, name, type) => h("label", {}, label, h("span", { class: "range" },
      h("input", { name: `${name}_from`, type: "number", step: type, placeholder: "from", "aria-label": `${label} from`, value: page.state[`${name}_from`] ?? "", input: set(`${name}_from`) }),
      h("input", { name: `${name}_to`, type: "number", step: type, placeholder: "to", "aria-label": `${label} to`, value: page.state[`${name}_to`] ?? "", input: set(`${name}_to`) })));
    filters.replaceChildren(
      field("search in texts", "text", { type: "search", placeholder: "words, or \"a phrase\"" }),
      select("environment", "env", [["", "any"], ...facets.envs.map(([env, count]) => [env, `${env} (${number(count)})`])]),
      select("error", "error", [["", "with or without"], ["none", "none"], ["any error", "any error"], ...facets.errors.map(([error, count]) => [error, `${error} (${number(count)})`])]),
      range("reward", "reward", "any"),
      range("step", "step", "1"),
      select("order", "sort", page.sorts.map((sort) => [sort === "newest" ? "" : sort, sort])));
  }

  function showList(run) {
    list.replaceChildren(...rows.map((row) => h("li", {}, h("a", {
      href: `#n=${row.n}`, "data-n": row.n, "aria-current": String(row.n) === page.state.n ? "true" : undefined,
      click: (event) => { event.preventDefault(); page.go({ n: String(row.n) }); },
    },
    h("span", { class: "name" }, row.env), h("span", { class: row.reward < 0 ? "reward low" : "reward" }, number(row.reward, 3)),
    h("span", { class: row.error ? "more bad" : "more" }, row.error || [trainedOn(row), row.step !== null ? `step ${row.step}` : null, `seed ${row.seed}`, plural(row.turns, "turn")].filter(Boolean).join(" · "))))));
    const last = Math.max(0, Math.ceil(total / PER_PAGE) - 1);
    const current = Math.floor(offset() / PER_PAGE);
    const to = (place) => () => turnPage(place);
    pager.replaceChildren(
      h("button", { type: "button", disabled: current === 0, click: to(0), "aria-label": "first page" }, "«"),
      h("button", { type: "button", disabled: current === 0, click: to(current - 1), "aria-label": "page before" }, "‹"),
      h("span", { role: "status" }, total ? `${number(offset() + 1)}–${number(offset() + rows.length)} of ${number(total)}` : "no episode fits"),
      h("button", { type: "button", disabled: current >= last, click: to(current + 1), "aria-label": "next page" }, "›"),
      h("button", { type: "button", disabled: current >= last, click: to(last), "aria-label": "last page" }, "»"),
      run.episodes.indexed < run.episodes.bytes ? h("small", { role: "status" }, `indexed ${Math.floor(run.episodes.indexed / run.episodes.bytes * 100)} %`) : "");
  }

  async function loadDetail(run) {
    const n = page.state.n;
    const colour = Object.hasOwn(COLOURS, page.state.colour ?? "") ? page.state.colour : "none";
    for (const link of list.querySelectorAll("a")) {
      const here = link.dataset.n === n;
      if (here) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
      if (here && opened !== `${run.id}/${n}/${colour}`) link.scrollIntoView({ block: "nearest" });
    }
    if (!n) {
      opened = "";
      detail.replaceChildren(note("Choose an episode. j and k open the next and the one before; ? lists all keys."));
      return;
    }
    if (opened === `${run.id}/${n}/${colour}`) return;
    const same = opened.startsWith(`${run.id}/${n}/`);
    opened = `${run.id}/${n}/${colour}`;
    const mine = opened;
    let nodes;
    try {
      nodes = episodeNode(await page.source.episode(run.id, n), colour, (picked) => page.go({ colour: picked === "none" ? "" : picked }));
    } catch (error) {
      nodes = [note(error.message, "problem")];
    }
    if (mine !== opened) return;
    detail.replaceChildren(...nodes);
    if (!same) detail.scrollTop = 0;
  }

  function turnPage(place, pick) {
    const last = Math.max(0, Math.ceil(total / PER_PAGE) - 1);
    const chosen = Math.min(last, Math.max(0, place));
    page.go({ offset: chosen ? String(chosen * PER_PAGE) : "", n: "" }).then(() => {
      if (pick && rows.length) page.go({ n: String((pick === "first" ? rows[0] : rows.at(-1)).n) });
    });
  }

  function step(by) {
    if (!rows.length) return;
    const at = rows.findIndex((row) => String(row.n) === page.state.n);
    const next = at < 0 ? 0 : at + by;
    const current = Math.floor(offset() / PER_PAGE);
    if (next >= rows.length && offset() + rows.length < total) turnPage(current + 1, "first");
    else if (next < 0 && current > 0) turnPage(current - 1, "last");
    else if (rows[next]) page.go({ n: String(rows[next].n) });
  }

  const keys = {
    "j": () => step(1),
    "k": () => step(-1),
    "]": () => turnPage(Math.floor(offset() / PER_PAGE) + 1),
    "[": () => turnPage(Math.floor(offset() / PER_PAGE) - 1),
    "/": () => filters.querySelector("input")?.focus(),
    "c": () => {
      const all = Object.keys(COLOURS);
      page.go({ colour: all[(all.indexOf(page.state.colour || "none") + 1) % all.length] });
    },
  };

  return { node, update, keys };
}
