/*
 * The chat page. Every conversation is a lane of one WebSocket (`stream_id`), so that answers run side by side while one looks
 * at another; its KV stays with the server in a session of its own, whose pages are drawn beside the text. Where no WebSocket
 * is to be had (a proxy without upgrades, a server that wants a key) the same goes over server-sent events.
 */
const $ = id => document.getElementById(id);
const STORE = "kvasir.conversations", SETTINGS = "kvasir.settings", KEEP = 200;

/* ---- What is kept in the browser ---- */
const defaults = { system: "", temperature: 0.7, topP: 1, limit: 1024, seed: "", policy: "", kept: "", summary: "", theme: "",
	kv: matchMedia("(min-width: 75rem)").matches };
const settings = { ...defaults, ...read(SETTINGS) };
let key = sessionStorage.getItem("kvasir.key") ?? "";
let conversations = read(STORE)?.list ?? [];
let current = null; // one of them, or one that has no turn yet and is not among them

function read(name) {
	try { return JSON.parse(localStorage.getItem(name)); } catch { return null; }
}

function keep() {
	conversations.sort((a, b) => b.time - a.time);
	conversations.length = Math.min(conversations.length, KEEP);
	for (;;) {
		try {
			localStorage.setItem(STORE, JSON.stringify({ list: conversations.map(({ id, title, time, turns }) => ({ id, title, time, turns })) }));
			return;
		} catch {
			if (conversations.length < 2) { notice("This browser keeps no more: the conversation ends with the page."); return; }
			conversations.pop(); // the oldest makes room
		}
	}
}

function keepSettings() {
	try { localStorage.setItem(SETTINGS, JSON.stringify(settings)); } catch { /* they last as long as the page */ }
}

function newConversation() {
	const bytes = crypto.getRandomValues(new Uint8Array(9));
	return { id: "c" + [...bytes].map(b => b.toString(36).padStart(2, "0")).join(""), title: "", time: Date.now(), turns: [] };
}

/*
 * What a conversation has while the page is open: `run` is the answer that is being written; `kv`, `moved` (pages, since the last turn)
 * and `summary` are what the server told of its session.
 */
const live = new Map(), unmoved = () => ({ down: 0, up: 0, lost: 0 });
function liveOf(c) {
	if (!live.has(c.id)) live.set(c.id, { run: null, response: null, session: null, kv: null, moved: unmoved(), summary: null,
		usage: null, facts: null });
	return live.get(c.id);
}

/* ---- The server ---- */
let model = null, context = 0, pageTokens = 16;
let socket = null, opening = null, tries = 0, retryTimer = 0, noSocket = false;

function headers() {
	return { "content-type": "application/json", ...(key ? { authorization: "Bearer " + key } : {}) };
}

async function call(method, path, body) {
	const r = await fetch(path, { method, headers: headers(), body: body && JSON.stringify(body) });
	const answer = await r.json().catch(() => null);
	if (!r.ok) throw Object.assign(new Error(answer?.error?.message ?? `HTTP ${r.status}`), { status: r.status, code: answer?.error?.code });
	return answer;
}

function showLink(kind, text) {
	$("link").className = "link " + kind;
	$("link").lastElementChild.textContent = text;
	$("link").title = text;
}

async function loadModel() {
	try {
		const m = (await call("GET", "/v1/models")).data[0];
		if (!m) throw new Error("The model is loading");
		model = m.id;
		context = m.max_model_len;
		$("model").textContent = `${m.meta?.name ?? m.id} · ${m.meta?.quantization ?? ""} · ${m.max_model_len.toLocaleString()} tokens of context`;
		if (!key) connect().catch(() => {});
		else showLink("on", "server-sent events");
		drawKv();
	} catch (e) {
		$("model").textContent = e.status === 401 ? "the server wants a key: see the settings" : "waiting for the server";
		showLink("off", e.status ? e.message : "no connection");
		if (e.status === 401) notice("The server wants an API key.", "Settings", openSettings);
		else setTimeout(loadModel, 1500);
	}
}

/* One socket for all conversations; what they continue on it is lost with it, and is then sent again as a whole. */
function connect() {
	clearTimeout(retryTimer);
	if (socket?.readyState === WebSocket.OPEN) return Promise.resolve(socket);
	opening ??= new Promise((resolve, reject) => {
		const ws = new WebSocket(location.origin.replace(/^http/, "ws") + "/v1/responses");
		showLink("wait", "connecting");
		ws.onopen = () => {
			socket = ws;
			opening = null;
			tries = 0;
			for (const l of live.values()) l.response = null;
			showLink("on", "connected");
			hideNotice("lost");
			watchKv();
			resolve(ws);
		};
		ws.onmessage = e => onEvent(JSON.parse(e.data));
		ws.onclose = e => {
			const was = socket === ws;
			opening = null;
			socket = null;
			if (was) onLost(e);
			else {
				tries++;
				reject(new Error("no WebSocket"));
			}
			if (!noSocket && !key) again();
		};
	});
	return opening;
}

function again() {
	const wait = Math.min(30, 2 ** Math.min(tries, 5)) * (0.75 + Math.random() / 2);
	showLink("off", "not connected");
	clearTimeout(retryTimer);
	retryTimer = setTimeout(() => connect().catch(() => {}), wait * 1000);
}

function onLost(e) {
	const why = e.code === 1012 ? "The server restarts." : e.code === 1009 ? "The message was too large." : "The connection was lost.";
	notice(why + " Trying again …", "Now", () => connect().catch(() => {}), "lost");
	for (const [id, l] of live)
		if (l.run) fail(conversations.find(c => c.id === id), why + " What had come so far is kept.");
}

/* ---- An answer, whichever way it comes ---- */
function begin(c) {
	const l = liveOf(c);
	l.run = { text: "", started: performance.now(), first: 0, last: 0, n: 0, node: null, id: null, stop: null };
	if (c === current) showRun(c);
	l.moved = unmoved();
	showList();
	showGo();
	watchKv();
}

function onDelta(c, text) {
	const run = liveOf(c).run;
	if (!run || !text) return;
	run.last = performance.now();
	run.first ||= run.last;
	run.n++;
	run.text += text;
	if (c === current) paint();
}

let painting = false;
function paint() { // once a frame, however fast they come
	if (painting) return;
	painting = true;
	requestAnimationFrame(() => {
		painting = false;
		const run = liveOf(current).run;
		if (run?.node) follow(() => run.node.querySelector(".text").replaceChildren(...render(run.text)));
		if (!watched) drawKv();
	});
}

function finish(c, usage, reason) {
	const l = liveOf(c), run = l.run;
	if (!run) return;
	l.run = null;
	const now = performance.now(), facts = {};
	if (run.first) facts["first token after"] = ((run.first - run.started) / 1000).toFixed(2) + " s";
	if (usage) {
		facts["prompt"] = `${usage.input} tokens`;
		facts["found in the cache"] = `${usage.cached} (${Math.round(100 * usage.cached / Math.max(1, usage.input))}%)`;
		facts["answer"] = `${usage.output} tokens`;
		if (usage.output > 1 && run.last > run.first) facts["speed"] = ((usage.output - 1) / ((run.last - run.first) / 1000)).toFixed(1) + " tokens/s";
		l.usage = usage;
	}
	l.facts = facts;
	const notes = [];
	if (reason) notes.push(reason);
	if (usage) notes.push(`${usage.output} tokens`, facts.speed, usage.cached ? `${usage.cached} of ${usage.input} prompt tokens from the cache` : null);
	if (!run.text && !reason) l.error = "The answer is empty: the model ended it at once.";
	if (run.text) {
		c.turns.push({ role: "assistant", content: run.text, note: notes.filter(Boolean).join(" · ") });
		c.time = Date.now();
		keep();
	}
	if (c === current) showTurns(false);
	showList();
	showGo();
	if (!socket) pollKv();
}

function fail(c, message) {
	if (!c) return;
	finish(c, null, "broken off");
	liveOf(c).response = null;
	liveOf(c).error = message;
	if (c === current) showTurns(true);
}

/* ---- Over the WebSocket: only what is new travels ---- */
function onEvent(e) {
	if (e.type === "session.context") {
		onContext(e);
		return;
	}
	const c = conversations.find(k => k.id === e.stream_id) ?? (e.stream_id ? null : current);
	const l = c && liveOf(c);
	if (!l) return;
	switch (e.type) {
	case "response.created":
		if (l.run) l.run.id = e.response.id;
		break;
	case "response.output_text.delta":
		onDelta(c, e.delta);
		break;
	case "response.completed":
	case "response.incomplete": {
		const u = e.response.usage, why = e.response.incomplete_details?.reason;
		l.response = e.response.id;
		finish(c, u && { input: u.input_tokens, output: u.output_tokens, cached: u.input_tokens_details?.cached_tokens ?? 0 },
			why === "max_output_tokens" ? "cut at the longest answer" : why === "cancelled" ? "stopped" : "");
		break;
	}
	case "response.failed":
		fail(c, e.response.error?.message ?? "The answer failed.");
		break;
	case "error":
		/* What the server no longer has is sent again, once. */
		if (["session_not_found", "session_expired", "previous_response_not_found"].includes(e.error?.code) && l.run && !l.run.again) {
			l.run.again = true;
			l.session = e.error.code.startsWith("session") ? null : l.session;
			l.response = null;
			askSocket(c).catch(x => fail(c, x.message));
		} else if (e.error?.code === "websocket_stream_limit_reached" && l.run && !l.run.again) {
			l.run.again = true;
			const old = socket; // a new socket has no lanes yet
			socket = null;
			old.onclose = null;
			old.close(1000);
			askSocket(c).catch(x => fail(c, x.message));
		} else {
			fail(c, e.error?.message ?? "The request failed.");
		}
		break;
	}
}

async function ensureSession(c) {
	const l = liveOf(c);
	if (!l.session) l.session = (await call("POST", "/v1/sessions", {}).catch(() => null))?.id ?? null;
	if (c === current) watchKv();
}

function sampling() {
	return { temperature: settings.temperature, top_p: settings.topP, ...(settings.seed !== "" ? { seed: Number(settings.seed) } : {}) };
}

/* What becomes of a conversation that grows long, where the settings say so. */
function longTalk() {
	const { policy, kept } = settings;
	return policy ? { kv_cache: { policy, ...(policy === "full" ? {} : { max_cache_size: kept || 2048 }) } } : {};
}

async function askSocket(c) {
	const l = liveOf(c), ws = await connect();
	await ensureSession(c);
	if (!l.run) return;
	const body = { type: "response.create", stream_id: c.id, model, store: false, max_output_tokens: settings.limit,
		...sampling(), ...longTalk() };
	if (settings.summary) body.context_management = [{ type: "compaction", compact_threshold: settings.summary }];
	if (l.session) body.session_id = l.session;
	if (settings.system) body.instructions = settings.system;
	if (l.response) {
		body.previous_response_id = l.response;
		body.input = c.turns.at(-1).content;
	} else {
		body.input = c.turns.map(({ role, content }) => ({ role, content }));
	}
	l.run.stop = () => ws.send(JSON.stringify({ type: "response.cancel", stream_id: c.id, ...(l.run.id ? { response_id: l.run.id } : {}) }));
	ws.send(JSON.stringify(body));
}

/* ---- Over server-sent events: chat completions in the session ---- */
async function askStream(c) {
	const l = liveOf(c), abort = new AbortController();
	let usage = null, reason = "";
	l.run.stop = () => abort.abort();
	await ensureSession(c);
	const messages = [...(settings.system ? [{ role: "system", content: settings.system }] : []), ...c.turns.map(({ role, content }) => ({ role, content }))];
	try {
		const r = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), signal: abort.signal,
			body: JSON.stringify({ model, messages, stream: true, stream_options: { include_usage: true }, max_tokens: settings.limit,
				...sampling(), ...longTalk(), ...(l.session ? { session_id: l.session } : {}) }) });
		if (!r.ok) {
			const error = (await r.json().catch(() => null))?.error;
			if (error?.code?.startsWith("session") && !l.run.again) {
				l.run.again = true;
				l.session = null;
				return askStream(c);
			}
			throw new Error(error?.message ?? `HTTP ${r.status}`);
		}
		const reader = r.body.pipeThrough(new TextDecoderStream()).getReader();
		for (let rest = "";;) {
			const { value, done } = await reader.read();
			if (done) break;
			const events = (rest + value).split("\n\n");
			rest = events.pop();
			for (const event of events) {
				if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
				const chunk = JSON.parse(event.slice(6)), choice = chunk.choices?.[0];
				if (chunk.error) throw new Error(chunk.error.message);
				onDelta(c, choice?.delta?.content);
				if (choice?.finish_reason === "length") reason = "cut at the longest answer";
				if (chunk.usage) usage = { input: chunk.usage.prompt_tokens, output: chunk.usage.completion_tokens,
					cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0 };
			}
		}
		finish(c, usage, reason);
	} catch (e) {
		if (abort.signal.aborted) finish(c, null, "stopped");
		else fail(c, e.message);
	}
}

async function ask(c) {
	liveOf(c).error = null;
	begin(c);
	if (!key) {
		try { await askSocket(c); return; } catch (e) {
			if (e.message !== "no WebSocket") { fail(c, e.message); return; }
			noSocket = tries > 1;
		}
	}
	if (liveOf(c).run) await askStream(c);
}

function shorten(text) {
	return text.length <= 60 ? text : text.slice(0, 60).replace(/\s\S*$/, "") + "…";
}

function send() {
	const text = $("input").value.trim(), c = current;
	if (!text || liveOf(c).run) return;
	$("input").value = "";
	grow();
	if (!conversations.includes(c)) {
		conversations.push(c);
		history.replaceState(null, "", "#" + c.id);
	}
	c.title ||= shorten(text.replace(/\s+/g, " "));
	c.turns.push({ role: "user", content: text });
	c.time = Date.now();
	keep();
	showTurns(true);
	$("scroll").scrollTop = $("scroll").scrollHeight;
	ask(c);
}

function stop() {
	liveOf(current).run?.stop?.();
}

/* Writes the last answer anew. */
function retry() {
	const c = current, l = liveOf(c);
	if (l.run) return;
	if (c.turns.at(-1)?.role === "assistant") c.turns.pop();
	l.response = null;
	showTurns(true);
	ask(c);
}

/* ---- Showing the conversation ---- */
const nearEnd = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < 90;

function follow(change) {
	const near = nearEnd();
	change();
	if (near) $("scroll").scrollTop = $("scroll").scrollHeight;
	$("down").hidden = nearEnd();
}

function turnNode(turn, last) {
	const text = element("div", { class: "text" }), node = element("article", { class: "turn " + turn.role }, text);
	if (turn.role === "user") text.textContent = turn.content;
	else text.append(...render(turn.content));
	if (turn.role === "assistant") {
		const meta = element("div", { class: "meta" }, ...(turn.note ? turn.note.split(" · ").map(n => element("span", {}, n)) : []));
		meta.append(element("div", { class: "tools" }, copyButton("Copy", () => turn.content),
			last ? element("button", { type: "button", onclick: retry }, "Again") : null));
		node.append(meta);
	}
	return node;
}

function showRun(c) {
	const run = liveOf(c).run;
	run.node = element("article", { class: "turn assistant live" }, element("div", { class: "text" }, ...render(run.text)), element("div", { class: "meta" }));
	follow(() => $("log").append(run.node));
}

function showHint() {
	const mark = document.querySelector(".brand svg").cloneNode(true);
	mark.setAttribute("width", 46);
	mark.setAttribute("height", 46);
	const starts = ["Explain how a KV cache makes the second turn fast", "Write a haiku about a lighthouse in winter",
		"A C function that reverses a linked list", "Three uses for a cold cup of tea"];
	$("log").replaceChildren(element("div", { class: "hint" }, mark, element("h1", {}, "What would you like to know?"),
		element("p", {}, "Your words stay between this browser and this server."),
		element("div", { class: "starts" }, ...starts.map(s => element("button", { type: "button", onclick: () => { $("input").value = s; send(); } }, s)))));
}

function showTurns(toEnd) {
	const c = current, l = liveOf(c);
	$("title").textContent = c.title || "New conversation";
	document.title = c.title ? `${c.title} – Kvasir` : "Kvasir";
	const near = toEnd || nearEnd();
	if (!c.turns.length && !l.run) showHint();
	else {
		$("log").replaceChildren(...c.turns.map((t, i) => turnNode(t, i === c.turns.length - 1 && !l.run)));
		if (l.run) showRun(c);
		if (l.error) $("log").append(element("article", { class: "turn error" }, element("div", { class: "text", role: "alert" }, l.error),
			element("div", { class: "meta" }, element("button", { type: "button", onclick: retry }, "Try again"))));
	}
	if (near) $("scroll").scrollTop = $("scroll").scrollHeight;
	$("down").hidden = nearEnd();
	showGo();
	drawKv();
}

function showList() {
	$("list").replaceChildren(...conversations.map(c => {
		const a = element("a", { href: "#" + c.id, title: c.title }, element("span", {}, c.title || "Untitled"),
			element("button", { type: "button", "aria-label": `Delete "${c.title}"`, onclick: e => { e.preventDefault(); e.stopPropagation(); remove(c); } }, "✕"));
		if (c === current) a.setAttribute("aria-current", "page");
		a.classList.toggle("busy", Boolean(liveOf(c).run));
		return a;
	}));
}

function showGo() {
	const busy = Boolean(liveOf(current).run);
	$("go").classList.toggle("stop", busy);
	$("go").setAttribute("aria-label", busy ? "Stop" : "Send");
	$("go").disabled = !busy && !$("input").value.trim();
}

function open(c) {
	current = c;
	history.replaceState(null, "", conversations.includes(c) ? "#" + c.id : location.pathname);
	document.body.classList.remove("side");
	showList();
	showTurns(true);
	watchKv();
	if (matchMedia("(hover: hover)").matches) $("input").focus();
}

function remove(c) {
	const l = liveOf(c);
	l.run?.stop?.();
	if (l.session) call("DELETE", "/v1/sessions/" + l.session).catch(() => {});
	conversations = conversations.filter(k => k !== c);
	live.delete(c.id);
	keep();
	if (c === current) open(newConversation());
	else showList();
}

let noticeKind = "";
function notice(text, action, act, kind = "") {
	noticeKind = kind;
	$("notice").hidden = false;
	$("notice").firstElementChild.textContent = text;
	$("notice-act").textContent = action ?? "";
	$("notice-act").onclick = () => { $("notice").hidden = true; act?.(); };
}

function hideNotice(kind) {
	if (noticeKind === kind) $("notice").hidden = true;
}

function grow() {
	const t = $("input");
	t.style.height = "auto";
	t.style.height = Math.max(40, t.scrollHeight) + "px";
	showGo();
}

/* ---- Settings ---- */
const fields = { system: "system", temperature: "temperature", "top-p": "topP", limit: "limit", seed: "seed", policy: "policy",
	"kept-tokens": "kept", summary: "summary", theme: "theme" };

function showSettings() {
	for (const [id, name] of Object.entries(fields)) $(id).value = settings[name];
	$("key").value = key;
	$("temperature-out").textContent = settings.temperature.toFixed(1);
	$("top-p-out").textContent = settings.topP.toFixed(2);
	const dark = settings.theme ? settings.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
	document.documentElement.dataset.theme = dark ? "dark" : "light";
	drawKv();
}

function openSettings() {
	showSettings();
	$("settings").showModal();
}

function takeSettings() {
	settings.system = $("system").value;
	settings.temperature = Number($("temperature").value);
	settings.topP = Number($("top-p").value);
	settings.limit = Math.max(1, parseInt($("limit").value, 10) || defaults.limit);
	settings.seed = /^-?\d+$/.test($("seed").value.trim()) ? $("seed").value.trim() : "";
	settings.policy = $("policy").value;
	for (const id of ["kept-tokens", "summary"]) settings[fields[id]] = Math.max(0, parseInt($(id).value, 10)) || "";
	settings.theme = $("theme").value;
	const before = key;
	key = $("key").value.trim();
	try { sessionStorage.setItem("kvasir.key", key); } catch { /* it lasts as long as the page */ }
	keepSettings();
	showSettings();
	if (key !== before) {
		if (key) socket?.close(1000);
		loadModel();
	}
}

/* ---- What a person does ---- */
$("form").onsubmit = e => { e.preventDefault(); if (liveOf(current).run) stop(); else send(); };
$("input").oninput = grow;
$("input").onkeydown = e => {
	if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
		e.preventDefault();
		send();
	}
};
document.onkeydown = e => {
	const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName);
	const at = conversations.indexOf(current);
	if (e.key === "Escape" && !$("settings").open) {
		if (document.body.classList.contains("side")) document.body.classList.remove("side");
		else stop();
	} else if (e.key === "/" && !typing) {
		e.preventDefault();
		$("input").focus();
	} else if (e.altKey && e.code === "KeyN") {
		e.preventDefault();
		open(newConversation());
	} else if (e.altKey && e.code === "KeyK") {
		e.preventDefault();
		toggleKv(!document.body.classList.contains("kv"));
	} else if (e.altKey && (e.key === "ArrowUp" || e.key === "ArrowDown")) {
		e.preventDefault();
		const next = conversations[at + (e.key === "ArrowUp" ? -1 : 1)];
		if (next) open(next);
	}
};
$("fresh").onclick = () => open(newConversation());
$("side-open").onclick = () => document.body.classList.add("side");
$("side-close").onclick = () => document.body.classList.remove("side");
$("veil").onclick = () => { document.body.classList.remove("side"); showKv(false); };
$("kv-toggle").onclick = () => toggleKv(!document.body.classList.contains("kv"));
$("kv-close").onclick = () => toggleKv(false);
$("settings-open").onclick = openSettings;
$("settings").onclose = takeSettings;
$("temperature").oninput = () => { $("temperature-out").textContent = Number($("temperature").value).toFixed(1); };
$("top-p").oninput = () => { $("top-p-out").textContent = Number($("top-p").value).toFixed(2); };
$("forget").onclick = () => {
	if (!confirm("Delete all conversations from this browser?")) return;
	for (const c of [...conversations]) remove(c);
};
$("notice-close").onclick = () => { $("notice").hidden = true; };
$("scroll").onscroll = () => { $("down").hidden = nearEnd(); };
$("down").onclick = () => { $("scroll").scrollTop = $("scroll").scrollHeight; };
onhashchange = () => {
	const c = conversations.find(k => "#" + k.id === location.hash);
	if (c && c !== current) open(c);
};
onresize = drawKv;
ononline = () => { if (!key) connect().catch(() => {}); };
document.onvisibilitychange = () => { if (!document.hidden && !socket) pollKv(); };
matchMedia("(prefers-color-scheme: dark)").onchange = showSettings;

current = conversations.find(c => "#" + c.id === location.hash) ?? newConversation();
showSettings();
showKv(settings.kv && matchMedia("(min-width: 60.01rem)").matches);
open(current);
loadModel();
