"use strict";
/*
 * A model's text -> nodes: fences, headings, lists, quotes, rules, `code`, **strong**, *emphasis*. Nodes are built one by one,
 * never from HTML, and links stay text: whatever a model writes cannot run or load anything.
 */
function element(name, attributes, ...children) {
	const node = document.createElement(name);
	for (const [key, value] of Object.entries(attributes ?? {})) {
		if (key.startsWith("on")) node[key] = value;
		else node.setAttribute(key, value);
	}
	node.append(...children.filter(c => c !== null && c !== undefined));
	return node;
}

function inline(text) {
	const nodes = [], pattern = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|(?<![\w*])\*([^*\s][^*\n]*)\*(?![\w*])/g;
	let at = 0;
	for (const m of text.matchAll(pattern)) {
		nodes.push(text.slice(at, m.index));
		nodes.push(m[1] !== undefined ? element("code", {}, m[1]) : m[2] !== undefined ? element("strong", {}, m[2]) : element("em", {}, m[3]));
		at = m.index + m[0].length;
	}
	nodes.push(text.slice(at));
	return nodes;
}

function copyButton(label, text) {
	const button = element("button", { type: "button" }, label);
	button.onclick = async () => {
		try { await navigator.clipboard.writeText(text()); } catch {
			const area = element("textarea", {}); // pages without TLS have no clipboard
			area.value = text();
			document.body.append(area);
			area.select();
			document.execCommand("copy");
			area.remove();
		}
		button.textContent = "Copied";
		setTimeout(() => { button.textContent = label; }, 1200);
	};
	return button;
}

function fence(language, code) {
	return element("div", { class: "fence" },
		element("div", {}, element("span", {}, language || "text"), copyButton("Copy", () => code)),
		element("pre", {}, element("code", {}, code)));
}

/* Items of a list from line i on; nested ones stand deeper. Returns [node, next line]. */
function list(lines, i, indent) {
	const item = /^(\s*)([-*+]|\d{1,3}[.)])\s+(.*)$/, first = lines[i].match(item);
	const node = element(/\d/.test(first[2]) ? "ol" : "ul", /\d/.test(first[2]) ? { start: parseInt(first[2], 10) } : {});
	while (i < lines.length) {
		const m = lines[i].match(item);
		if (!m || m[1].length < indent) break;
		if (m[1].length > indent + 1 && node.lastChild) {
			const [inner, next] = list(lines, i, m[1].length);
			node.lastChild.append(inner);
			i = next;
		} else {
			node.append(element("li", {}, ...inline(m[3])));
			i++;
			while (i < lines.length && /^\s{2,}\S/.test(lines[i]) && !item.test(lines[i]))
				node.lastChild.append("\n", ...inline(lines[i++].trim()));
		}
	}
	return [node, i];
}

function render(text) {
	const out = [], lines = text.split("\n");
	let paragraph = [];
	const flush = () => {
		if (paragraph.length) out.push(element("p", {}, ...inline(paragraph.join("\n"))));
		paragraph = [];
	};
	for (let i = 0; i < lines.length;) {
		const line = lines[i], open = line.match(/^\s*(```+|~~~+)\s*([\w+#.-]*)/), heading = line.match(/^(#{1,6})\s+(.*)$/);
		if (open) {
			flush();
			const code = [];
			for (i++; i < lines.length && !lines[i].trim().startsWith(open[1]); i++) code.push(lines[i]);
			i++;
			out.push(fence(open[2], code.join("\n")));
		} else if (heading) {
			flush();
			out.push(element(heading[1].length < 3 ? "h3" : "h4", {}, ...inline(heading[2])));
			i++;
		} else if (/^\s*([-*+]|\d{1,3}[.)])\s+\S/.test(line)) {
			flush();
			const [node, next] = list(lines, i, line.match(/^\s*/)[0].length);
			out.push(node);
			i = Math.max(next, i + 1);
		} else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
			flush();
			out.push(element("hr"));
			i++;
		} else if (/^>\s?/.test(line)) {
			flush();
			const quote = [];
			for (; i < lines.length && /^>\s?/.test(lines[i]); i++) quote.push(lines[i].replace(/^>\s?/, ""));
			out.push(element("blockquote", {}, ...inline(quote.join("\n"))));
		} else {
			if (line.trim()) paragraph.push(line);
			else flush();
			i++;
		}
	}
	flush();
	return out;
}
