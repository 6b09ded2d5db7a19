/*
 * The KV cache beside the text. Over the WebSocket the server itself tells of each change of the session in view (session.context
 * events), while an answer is written as well as when another conversation pushes it out; it is asked from time to time only where there
 * is no WebSocket.
 */
let watched = null; // { socket, session }: whose events come

/* The session of the conversation in view is the one that is told of. */
function watchKv() {
	const session = liveOf(current).session;
	if (!socket) {
		pollKv();
		return;
	}
	clearTimeout(kvTimer);
	if (watched?.socket !== socket) watched = null; // what a socket asked for ends with it
	if (watched?.session === session) return;
	const say = (session_id, context_events) =>
		socket.send(JSON.stringify({ type: "session.update", session_id, context_events }));
	if (watched) say(watched.session, false);
	watched = session ? { socket, session } : null;
	if (watched) say(session, true);
}

function onContext(e) {
	const l = [...live.values()].find(k => k.session === e.session_id);
	if (!l) return;
	if (e.ended) {
		l.session = l.kv = l.usage = null; // the next turn begins another one
		l.ended = true;
		if (watched?.session === e.session_id) watched = null;
	} else if (e.compaction) {
		l.summary = e.compaction;
	} else {
		takeKv(l, e);
		for (const way of ["down", "up", "lost"]) l.moved[way] += e.moved[way];
	}
	if (l === liveOf(current)) drawKv();
}

/* What an event says, or the session's page. */
function takeKv(l, { tokens, tokens_logical, policy, kv_cache, pages, pages_by_tier, kv_bytes, running, waiting, expires_in }) {
	const logical = tokens_logical ?? kv_cache.tokens_logical;
	l.kv = { tokens, logical, policy: policy ?? kv_cache.policy, pages, places: pages_by_tier, bytes: kv_bytes,
		running, waiting, expires_in };
	if (l.run?.first) l.run.input ??= Math.max(0, logical - l.run.n);
}

let kvTimer = 0;
async function pollKv() {
	clearTimeout(kvTimer);
	const c = current, l = liveOf(c);
	if (l.session && !document.hidden) {
		try {
			takeKv(l, await call("GET", "/v1/sessions/" + l.session));
		} catch (e) {
			if (e.status === 404) { l.session = null; l.kv = null; }
		}
	}
	if (c === current) drawKv();
	if (!socket) kvTimer = setTimeout(pollKv, liveOf(current).run ? 500 : 4000);
}

function bytes(n) {
	if (n >= 2 ** 30) return (n / 2 ** 30).toFixed(2) + " GiB";
	return n >= 2 ** 20 ? (n / 2 ** 20).toFixed(1) + " MiB" : (n / 1024).toFixed(0) + " KiB";
}

function facts(node, rows) {
	const known = Object.entries(rows).filter(([, v]) => v !== "" && v !== null);
	node.replaceChildren(...known.flatMap(([k, v]) => [element("dt", {}, k), element("dd", {}, String(v))]));
}

/* Where pages are, the nearest first: the key of pages_by_tier, what it is called, and how strongly it is drawn. */
const places = [["device", "on the device", 1], ["ram", "in RAM", .55], ["disk", "on disk", .3],
	["remote", "on the KV server", .3], ["lost", "to compute again", 0]];

/*
 * What the picture shows of a conversation: how many tokens of it the cache has; of those where the prompt's found part ends, and the
 * prompt (both go by the last usage; of an answer that is being written they are estimated, at one token a delta); how many tokens a
 * context policy let go of; and the strength of each page.
 */
function kvState(l) {
	const { run, usage: u, kv } = l, before = (u?.input ?? 0) + (u?.output ?? 0), n = name => kv?.places[name] ?? 0;
	const estimate = run ? (run.input ?? before) + run.n : before, gone = kv ? kv.logical - kv.tokens : 0;
	const below = n("ram") + n("disk") + n("remote"), all = (n("device") + below + n("lost")) * pageTokens;
	/* Of an idle session the server counts the tokens on the device; its pages, wherever they are, tell of the others. */
	const away = kv && !kv.running && below + n("lost") > 0;
	const there = away ? Math.max(kv.logical, Math.min(all, before || all)) : kv?.logical ?? 0;
	const logical = kv && watched ? there : Math.max(there, estimate);
	const input = run ? run.input ?? (run.n ? logical - run.n : logical) : u?.input ?? 0;
	const cached = Math.min(run ? before : u?.cached ?? 0, input);
	const order = places.flatMap(([name, , strength]) => Array(n(name)).fill(strength));
	/* An idle conversation's pages leave from the end. One that runs has some below only if it is larger than the cache: its first ones. */
	const larger = Boolean(kv?.running && below);
	if (larger) order.reverse();
	return { logical, tokens: logical - gone, gone, input, cached, order, larger };
}

/*
 * A square for each page of the context. The farther away a page is, the paler it is; one that is gone for now is a frame, and what a
 * context policy let go of for good a dot: behind the first page under `streaming`, anywhere (drawn at the end) under `evict`.
 */
function drawMap(l, s) {
	const canvas = $("kv-map"), width = canvas.clientWidth || 240, ratio = devicePixelRatio || 1;
	const pages = Math.max(1, Math.ceil((context || 2048) / pageTokens));
	const columns = pages > 4096 ? 64 : pages > 1024 ? 48 : pages > 512 ? 32 : pages > 256 ? 24 : 16;
	const gap = columns > 40 ? 1 : 2, cell = (width + gap) / columns;
	const shown = Math.min(pages, columns * Math.ceil(420 / cell)), rows = Math.ceil(shown / columns);
	canvas.style.height = rows * cell + "px";
	canvas.width = Math.round(width * ratio);
	canvas.height = Math.round(rows * cell * ratio);
	const g = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
	g.scale(ratio, ratio);
	const colors = Object.fromEntries(["hit", "new", "gen", "empty", "soft"].map(n => [n, style.getPropertyValue("--" + n)]));
	const kept = Math.ceil(s.tokens / pageTokens), dots = Math.min(Math.round(s.gone / pageTokens), Math.max(0, shown - kept));
	const from = l.kv?.policy === "streaming" ? 1 : kept; // the first dot
	for (let i = 0; i < shown; i++) {
		const x = (i % columns) * cell, y = Math.floor(i / columns) * cell, size = cell - gap;
		const box = (part, c) => {
			g.fillStyle = c;
			g.beginPath();
			g.roundRect(x, y, Math.max(1, size * part), size, Math.min(3, size / 4));
			g.fill();
		};
		box(1, colors.empty);
		if (i >= from && i < from + dots) {
			g.fillStyle = colors.soft;
			g.beginPath();
			g.arc(x + size / 2, y + size / 2, Math.max(.8, size / 7), 0, 7);
			g.fill();
			continue;
		}
		const page = i < from ? i : i - dots, first = page * pageTokens; // of what is kept
		if (first >= s.tokens) continue;
		const at = i < from || !dots ? first : first + s.gone; // of the conversation
		const c = at + pageTokens <= s.cached ? colors.hit : at < s.input ? colors.new : colors.gen;
		const strength = s.order[page] ?? 1;
		g.globalAlpha = strength;
		box(Math.min(1, (s.tokens - first) / pageTokens), c);
		g.globalAlpha = 1;
		if (strength === 1) continue;
		g.strokeStyle = c;
		g.lineWidth = gap / 2;
		g.strokeRect(x + gap / 4, y + gap / 4, size - gap / 2, size - gap / 2);
	}
	canvas.setAttribute("aria-label", `${kept} of ${pages} pages hold this conversation`);
	return pages;
}

function summaryText({ state, tokens_before, tokens_after, turns, background }) {
	if (state === "started") return background ? "being prepared" : "being written";
	return state === "failed" ? "failed" : `${turns} turns, ${tokens_before.toLocaleString()} → ${tokens_after.toLocaleString()} tokens`;
}

function drawKv() {
	if (!document.body.classList.contains("kv")) return;
	const l = liveOf(current), { run, kv } = l, s = kvState(l), pages = drawMap(l, s), n = k => k.toLocaleString();
	const there = places.map(p => [...p, kv ? kv.places[p[0]] : p[0] === "device" ? Math.ceil(s.tokens / pageTokens) : 0]);
	$("kv-fill").replaceChildren(...there.map(([name, title, strength, k]) => {
		const part = element("i", { class: name, title: `${k} pages ${title}` });
		part.style.width = 100 * Math.min(1, k / pages) + "%";
		part.style.opacity = strength;
		return part;
	}));
	$("legend-below").hidden = !there.slice(1, 4).some(p => p[3]);
	$("legend-lost").hidden = !there[4][3];
	$("legend-gone").hidden = !s.gone;
	$("kv-session").textContent = l.session ?? (l.ended ? "the session has ended" : "no session yet");
	$("kv-session").title = l.session ?? "";
	facts($("kv-facts"), { tokens: `${n(s.logical)} of ${n(context || 0)}`,
		policy: kv && kv.policy !== "full" ? kv.policy : null,
		"let go of": s.gone ? n(s.gone) + " tokens" : null,
		pages: kv ? n(there.reduce((sum, p) => sum + p[3], 0)) : "–",
		...Object.fromEntries(there.filter(p => p[3]).map(p => [p[1], n(p[3])])), size: kv ? bytes(kv.bytes) : "–",
		state: s.larger ? "larger than the cache" : run ? "writing" : kv?.running ? "running" : kv?.waiting ? "waiting"
			: kv ? "idle" : "–",
		"left the device": l.moved.down + l.moved.lost ? n(l.moved.down + l.moved.lost) + " pages" : null,
		"came back": l.moved.up ? n(l.moved.up) + " pages" : null,
		summary: l.summary ? summaryText(l.summary) : null,
		"kept for": kv?.expires_in ? Math.round(kv.expires_in) + " s more" : null });
	facts($("turn-facts"), l.facts ?? { "–": " " });
}

function showKv(on) {
	document.body.classList.toggle("kv", on);
	$("kv-toggle").setAttribute("aria-pressed", on);
	drawKv();
}

function toggleKv(on) {
	showKv(on);
	if (matchMedia("(min-width: 60.01rem)").matches) {
		settings.kv = on;
		keepSettings();
	}
}

