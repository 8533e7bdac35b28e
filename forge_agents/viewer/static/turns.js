// One episode: a lane per agent, with turns in order.

import { choice, h, note, number, plural, seconds } from "./dom.js";

export const COLOURS = { none: "plain", logprob: "log-probability", advantage: "advantage", version: "weights" };
const LONG = 3000;  // characters of a text shown at once
const MANY = 8;  // rewards of a turn's alternatives shown

export function episodeNode(episode, colour, pick) {
  const lanes = new Map(episode.agents.map((agent, place) => [agent.agent, place + 1]));
  const last = new Map();  // the turn of each agent so far
  const most = Math.max(1e-9, ...episode.turns.map((turn) => Math.abs(turn.advantage ?? 0)));
  const failed = episode.agents.map((agent) => agent.info?.program_error).find(Boolean);
  const head = h("header", {},
    h("h2", {}, episode.env),
    h("dl", { class: "facts" }, facts(episode).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    episode.error ? errorNode(episode.error) : failed ? errorNode({ kind: "the program failed", message: String(failed) }) : null);
  if (!episode.turns.length) return [head, results(episode)];
  const bar = h("div", { class: "bar" }, "colour tokens by", choice("colour tokens by", COLOURS, colour, pick), legend(episode, colour, most));
  const grid = h("div", { class: "lanes", vars: { "--lanes": lanes.size } },
    episode.agents.map((agent) => lane(agent, lanes.get(agent.agent), episode.turns.filter((turn) => turn.agent === agent.agent))),
    episode.turns.map((turn, row) => {
      const node = turnNode(turn, lanes.get(turn.agent), row + 2, colour, most, last.get(turn.agent));
      last.set(turn.agent, turn.index);
      return node;
    }));
  return [head, bar, grid];
}

function facts(episode) {
  return [
    ["seed", String(episode.seed)],
    episode.step !== null && ["step", number(episode.step)],
    ["reward", number(episode.reward)],
    episode.trained !== null && ["trained on", number(episode.trained)],
    episode.turns.length > 0 && ["turns", number(episode.turns.length)],
    ["ended", episode.end || "–"],
    ["took", seconds(episode.seconds)],
  ].filter(Boolean);
}

function errorNode(error) {
  return h("section", { class: "problem" },
    h("b", {}, [error.where, error.kind].filter(Boolean).join(": ") || "failed"), h("p", { dir: "auto" }, error.message),
    error.trace ? h("details", {}, h("summary", {}, "traceback"), h("pre", {}, error.trace)) : null);
}

// A benchmark stores the result of each agent, without turns.
function results(episode) {
  const names = [...new Set(episode.agents.flatMap((agent) => Object.keys(agent.facts ?? {})))];
  const table = h("table", {},
    h("thead", {}, h("tr", {}, ["agent", "player", "reward", ...names].map((name, at) => h("th", { scope: "col", class: at < 2 ? "text" : undefined }, name.replaceAll("_", " "))))),
    h("tbody", {}, episode.agents.map((agent) => h("tr", {},
      h("th", { scope: "row" }, agent.agent), h("td", { class: "text" }, agent.policy), h("td", {}, number(agent.reward)),
      names.map((name) => h("td", {}, plain(agent.facts?.[name])))))));
  return h("div", {}, h("div", { class: "scroll" }, table), note(episode.agents.some((agent) => agent.facts)
    ? "A benchmark stores the results of agents, without turns." : "No agent acted."));
}

function plain(value) {
  return typeof value === "number" ? number(value) : typeof value === "boolean" ? (value ? "yes" : "no") : String(value ?? "–");
}

function lane(agent, place, turns) {
  return h("div", { class: "lane", vars: { "--lane": place } },
    h("h3", { dir: "auto" }, agent.agent), h("p", {}, agent.policy, " · reward ", h("b", {}, number(agent.reward)),
      agent.trained !== null && agent.trained !== undefined ? [" · trained on ", h("b", {}, number(agent.trained))] : null),
    branches(turns),
    agent.instructions ? h("details", {}, h("summary", {}, "instructions"), text(agent.instructions)) : null,
    Object.keys(agent.info ?? {}).length ? h("details", {}, h("summary", {}, "last info"), h("pre", {}, JSON.stringify(agent.info, null, 1))) : null);
}

// The conversations of an agent, each below the one that it was forked from; nothing if there is only one.
function branches(turns) {
  const found = new Map();  // by branch
  for (const turn of turns) {
    if (!found.has(turn.branch)) found.set(turn.branch, { first: turn, turns: [] });
    found.get(turn.branch).turns.push(turn);
  }
  if (found.size < 2) return null;
  const of = new Map(turns.map((turn) => [turn.index, turn.branch]));
  const below = (parent) => [...found.values()].filter(({ first }) => (first.after === null ? null : of.get(first.after)) === parent);
  const tree = (parent) => h("ul", {}, below(parent).map(({ first, turns: own }) => h("li", { class: mark(first) },
    `branch ${number(first.branch)}${first.session_reward === null ? "" : `, reward ${number(first.session_reward)}`}`, first.after === null ? null : [", from ", jump(first.after)], ": ", own.map((turn, at) => [at ? " " : "", jump(turn.index)]),
    below(first.branch).length ? tree(first.branch) : null)));
  return h("details", { class: "tree", open: found.size <= 8 }, h("summary", {}, plural(found.size, "conversation")), tree(null));
}

function mark(turn) {
  return `branch v${((turn.branch % 6) + 6) % 6}`;
}

function jump(index) {
  return h("button", { type: "button", class: "jump", "aria-label": `show turn ${index + 1}`, click: (event) => {
    const turn = event.target.closest(".lanes").querySelector(`[data-turn="${index}"]`);
    turn?.scrollIntoView({ block: "center" });
    turn?.focus();
  } }, String(index + 1));
}

function turnNode(turn, place, row, colour, most, before) {
  const tags = [
    turn.session_reward !== null ? ["reward", `session's reward ${number(turn.session_reward)}`] : turn.reward ? ["reward", `reward ${number(turn.reward)}`] : null,
    turn.advantage !== null ? ["", `advantage ${number(turn.advantage, 3)}`] : null,
    turn.alternatives.length ? ["", `alternatives ${turn.alternatives.slice(0, MANY).map((reward) => (reward === null ? "failed" : number(reward, 3))).join(", ")}${turn.alternatives.length > MANY ? ", …" : ""}`] : null,
    turn.ids.length ? ["", plural(turn.ids.length, "token")] : null,
    turn.finish === "length" || turn.finish === "context" ? ["bad", `cut off: ${turn.finish}`] : null,
    turn.info.illegal ? ["bad", "illegal"] : null,
    turn.versions.length ? ["", `weights ${[...new Set(turn.versions.map(([version]) => version))].join(", ")}`] : null,
    turn.seconds ? ["", seconds(turn.seconds)] : null,
    turn.ended ? ["", turn.ended] : null,
  ].filter(Boolean);
  return h("article", { class: `turn ${mark(turn)}`, tabindex: "-1", "data-turn": turn.index, vars: { "--lane": place, "--row": row, "--depth": Math.min(turn.depth, 6) }, "aria-label": `turn ${turn.index} of ${turn.agent}` },
    h("div", { class: "who" }, `${turn.index + 1} · ${turn.agent}${turn.branch ? ` · branch ${number(turn.branch)}` : ""}`,
      turn.after === null || turn.after === before ? null : [" · goes on from ", jump(turn.after)]),
    turn.left_out ? h("details", {}, h("summary", {}, "left out before"), text(turn.left_out)) : null,
    h("div", { class: turn.result ? "heard result" : "heard" },
      h("span", { class: "label" }, turn.result ? "tool result" : "observation"), text(turn.observation)),
    turn.reasoning ? h("details", { class: "reasoning" }, h("summary", {}, turn.reasoning_tokens ? `reasoning, ${plural(turn.reasoning_tokens, "token")}` : "reasoning"), text(turn.reasoning)) : null,
    h("div", { class: "said" }, h("span", { class: "label" }, turn.calls.length ? "tool call" : "action"),
      turn.calls.map((call) => call.name ? h("code", { class: "call" }, `${call.name}(${Object.entries(call.arguments).map(([k, v]) => `${k}=${JSON.stringify(v)}`).join(", ")})`) : null),
      colour === "none" || !turn.ids.length ? text(turn.action) : tokens(turn, colour, most)),
    h("div", { class: "tags" }, tags.map(([kind, label]) => h("span", { class: `tag ${kind}` }, label))),
    Object.keys(turn.info).length ? h("details", {}, h("summary", {}, "info"), h("pre", {}, JSON.stringify(turn.info, null, 1))) : null);
}

// A text as it stands, isolated so that marks of writing direction in it turn nothing else around.
function text(value) {
  const node = h("div", { class: "words", dir: "auto" }, value.slice(0, LONG));
  if (!value.trim()) node.append(h("i", { class: "label" }, "(empty)"));
  if (value.length <= LONG) return node;
  const rest = h("button", { type: "button", click: () => { node.textContent = value; } }, `… show all ${number(value.length)} characters`);
  node.append(" ", rest);
  return node;
}

function tokens(turn, colour, most) {
  const version = (at) => turn.versions.find(([, start, end]) => at >= start && at < end)?.[0];
  const node = h("div", { class: "words tokens", dir: "auto" });
  turn.ids.forEach((id, at) => {
    const logprob = turn.logprobs[at] ?? null;
    const told = [
      `token ${id}`,
      logprob !== null ? `p ${number(Math.exp(logprob), 3)}, log-probability ${number(logprob, 3)}` : null,
      turn.advantage !== null ? `advantage ${number(turn.advantage, 3)}` : null,
      version(at) !== undefined ? `weights ${version(at)}` : null,
    ].filter(Boolean).join("\n");
    const [kind, strength] = tint(colour, logprob, turn.advantage, version(at), most);
    node.append(h("span", { class: `token ${kind}`, title: told, vars: { "--strength": `${strength}%` } }, turn.pieces ? turn.pieces[at] : `⟨${id}⟩`));
  });
  if (!turn.pieces) node.append(h("i", { class: "label" }, " (this run's tokenizer is not on this machine: ids are shown)"));
  return node;
}

function tint(colour, logprob, advantage, version, most) {
  if (colour === "logprob" && logprob !== null) return ["surprise", Math.round(Math.min(1, -logprob / 5) * 70)];
  if (colour === "advantage" && advantage !== null) return [advantage < 0 ? "worse" : "better", Math.round(Math.abs(advantage) / most * 60)];
  if (colour === "version" && version !== undefined) return [`version v${((version % 6) + 6) % 6}`, 35];
  return ["", 0];
}

function legend(episode, colour, most) {
  const swatch = (kind, strength, label) => h("span", {}, h("span", { class: `token ${kind}`, vars: { "--strength": `${strength}%` } }, " a "), ` ${label} `);
  if (colour === "logprob") return h("span", { class: "legend" }, swatch("surprise", 0, "p = 1"), swatch("surprise", 32, "p = 0.1"), swatch("surprise", 70, "p < 0.01"));
  if (colour === "advantage") {
    if (!episode.turns.some((turn) => turn.advantage !== null)) return h("span", { class: "legend" }, "nothing was learned from this episode");
    return h("span", { class: "legend" }, swatch("worse", 60, number(-most, 3)), swatch("better", 60, number(most, 3)));
  }
  if (colour === "version") {
    const versions = [...new Set(episode.turns.flatMap((turn) => turn.versions.map(([version]) => version)))].sort((a, b) => a - b);
    return h("span", { class: "legend" }, versions.map((version) => swatch(`version v${((version % 6) + 6) % 6}`, 35, `weights ${version}`)));
  }
  return null;
}
