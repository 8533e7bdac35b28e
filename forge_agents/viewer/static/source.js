// Source of the data: the server of this page, or the page itself if it was saved as a file.

export function openSource() {
  const inside = document.getElementById("data");
  return inside ? new Inside(JSON.parse(inside.textContent)) : new Server();
}

class Server {
  live = true;

  async get(path, asked = {}) {
    const known = Object.entries(asked).filter(([, value]) => value !== "" && value !== undefined && value !== null);
    const query = new URLSearchParams(known).toString();
    const answer = await fetch(`api/${path}${query ? `?${query}` : ""}`);
    const body = await answer.json().catch(() => ({ detail: `status ${answer.status}` }));
    if (!answer.ok) throw new Error(typeof body.detail === "string" ? body.detail : "the server did not understand");
    return body;
  }

  runs() { return this.get("runs"); }
  view(run, name) { return this.get(`runs/${run}/${name}`); }  // metrics, settings, verifiers, tables or facets
  episodes(run, asked) { return this.get(`runs/${run}/episodes`, asked); }
  episode(run, n) { return this.get(`runs/${run}/episodes/${n}`); }
}

const ORDERS = {
  "newest": (row) => [-row.n],
  "oldest": (row) => [row.n],
  "highest reward": (row) => [-(row.reward ?? -Infinity), -row.n],
  "lowest reward": (row) => [row.reward ?? Infinity, -row.n],
  "highest trained reward": (row) => [-(row.trained ?? -Infinity), -row.n],
  "most turns": (row) => [-row.turns, -row.n],
  "most tokens": (row) => [-row.tokens, -row.n],
  "slowest": (row) => [-row.seconds, -row.n],
};

class Inside {
  live = false;

  constructor(data) { this.data = data; }

  async runs() { return { runs: this.data.runs.map((run) => run.status), sorts: this.data.sorts }; }
  async view(run, name) { return this.data.runs[run][name]; }

  async episodes(run, asked) {
    const { rows, episodes } = this.data.runs[run];
    const words = [...(asked.text ?? "").matchAll(/"([^"]+)"|([^\s"]+)/g)].map((m) => (m[1] ?? m[2]).toLowerCase());
    const within = (value, from, to) =>
      (from === undefined || from === "" || (value !== null && value >= Number(from))) &&
      (to === undefined || to === "" || (value !== null && value <= Number(to)));
    const found = rows.filter((row) =>
      (!asked.env || row.env === asked.env) &&
      (!asked.error || (asked.error === "none" ? !row.error : asked.error === "any error" ? row.error : row.error === asked.error)) &&
      within(row.reward, asked.reward_from, asked.reward_to) && within(row.step, asked.step_from, asked.step_to) &&
      words.every((word) => said(episodes[row.n]).includes(word)));
    const key = ORDERS[asked.sort || "newest"];
    found.sort((a, b) => key(a)[0] - key(b)[0] || (key(a)[1] ?? 0) - (key(b)[1] ?? 0));
    const offset = Number(asked.offset ?? 0);
    return { total: found.length, rows: found.slice(offset, offset + Number(asked.limit ?? 50)) };
  }

  async episode(run, n) {
    const found = this.data.runs[run].episodes[n];
    if (found.problem) throw new Error(found.problem);
    return found;
  }
}

function said(episode) {
  if (episode.problem) return episode.problem.toLowerCase();
  const turns = episode.turns.map((turn) => `${turn.observation}\n${turn.reasoning ?? ""}\n${turn.action}`);
  const agents = episode.agents.map((agent) => agent.policy);
  const error = episode.error ? [episode.error.kind, episode.error.message] : [];
  return [episode.env, ...turns, ...agents, ...error].join("\n").toLowerCase();
}

