/* The methods of Python's str. Everything cut or changed keeps the marks of the bytes it came from. */
#include "engine/base/utf8.h"
#include "engine/text/template_render.h"
#include "engine/text/template_unicode.h"

static bool same_flags(struct call *c)
{
	c->out->flags = c->self.flags;
	return true;
}

/* ---- Case ---- */

static bool add_mapped(struct render *r, struct text *t, const struct value *s, size_t from, size_t to, uint32_t cp,
		       enum char_case to_case)
{
	uint32_t mapped[3];
	char utf8[12];
	size_t n = 0;
	int count = char_map(cp, to_case, mapped);
	for (int i = 0; i < count; i++)
		n += utf8_encode(mapped[i], utf8 + n);
	return text_add_as(r, t, utf8, n, s, from, to);
}

/* A capital sigma at the end of a word has a lower case of its own. */
static bool final_sigma(const struct value_text *s, size_t at, size_t len)
{
	uint32_t cp;
	bool before = false;
	for (size_t i = at; i > 0;) {
		i = char_prev(s->p, i);
		char_next(s->p + i, s->n - i, &cp);
		if (cp == '\'' || cp == '.' || cp == 0xad || cp == 0x2019)
			continue;
		before = char_is_alpha(cp);
		break;
	}
	if (!before)
		return false;
	for (size_t i = at + len; i < s->n;) {
		i += char_next(s->p + i, s->n - i, &cp);
		if (cp == '\'' || cp == '.' || cp == 0xad || cp == 0x2019)
			continue;
		return !char_is_alpha(cp);
	}
	return true;
}

enum word_case { WORDS_SAME, WORDS_CAPITALIZE, WORDS_TITLE, WORDS_SWAP };

/* Maps every character; `words` says how the case depends on where a character stands. */
static bool map_case(struct render *r, const struct value *s, enum char_case to_case, enum word_case words,
		     struct value *out)
{
	struct text t = {0};
	const char *p = s->s->p;
	bool in_word = false;
	if (!render_spend(r, s->s->n / 16))
		return false;
	for (size_t i = 0; i < s->s->n;) {
		uint32_t cp;
		size_t len = char_next(p + i, s->s->n - i, &cp);
		enum char_case how = to_case;
		if (words == WORDS_CAPITALIZE)
			how = i == 0 ? CASE_TITLE : CASE_LOWER;
		else if (words == WORDS_TITLE)
			how = in_word ? CASE_LOWER : CASE_TITLE;
		else if (words == WORDS_SWAP)
			how = char_is_upper(cp) ? CASE_LOWER : CASE_UPPER;
		in_word = char_is_upper(cp) || char_is_lower(cp) || char_is_title(cp);
		if (how == CASE_LOWER && cp == 0x3a3 && final_sigma(s->s, i, len)) {
			if (!text_add_as(r, &t, "\xcf\x82", 2, s, i, i + len))
				return false;
		} else if (cp == 0xfffd || (words == WORDS_SWAP && !in_word)) {
			if (!text_add_part(r, &t, s, i, i + len))
				return false;
		} else if (!add_mapped(r, &t, s, i, i + len, cp, how)) {
			return false;
		}
		i += len;
	}
	return text_finish(r, &t, out);
}

static bool run_upper(struct call *c)
{
	return map_case(c->r, &c->self, CASE_UPPER, WORDS_SAME, c->out) && same_flags(c);
}

static bool run_lower(struct call *c)
{
	return map_case(c->r, &c->self, CASE_LOWER, WORDS_SAME, c->out) && same_flags(c);
}

static bool run_casefold(struct call *c)
{
	return map_case(c->r, &c->self, CASE_FOLD, WORDS_SAME, c->out) && same_flags(c);
}

static bool run_capitalize(struct call *c)
{
	return map_case(c->r, &c->self, CASE_LOWER, WORDS_CAPITALIZE, c->out) && same_flags(c);
}

static bool run_title(struct call *c)
{
	return map_case(c->r, &c->self, CASE_LOWER, WORDS_TITLE, c->out) && same_flags(c);
}

static bool run_swapcase(struct call *c)
{
	return map_case(c->r, &c->self, CASE_LOWER, WORDS_SWAP, c->out) && same_flags(c);
}

/* ---- Stripping ---- */

static bool in_set(const struct value *set, const char *p, size_t len, uint32_t cp)
{
	if (!set)
		return char_is_space(cp);
	return memmem(set->s->p, set->s->n, p, len) != NULL;
}

/* [*from, *to) without the characters of `set` (NULL: spaces) at the chosen ends. */
static bool strip_range(struct render *r, const struct value *s, const struct value *set, bool left, bool right,
			size_t *from, size_t *to)
{
	const char *p = s->s->p;
	uint32_t cp;
	uint64_t cost = 1 + (set ? set->s->n / 32 : 0);
	*from = 0;
	*to = s->s->n;
	while (left && *from < *to) {
		size_t len = char_next(p + *from, *to - *from, &cp);
		if (!in_set(set, p + *from, len, cp))
			break;
		*from += len;
		if ((*from & 63) == 0 && !render_spend(r, cost))
			return false;
	}
	while (right && *to > *from) {
		size_t last = *from + char_prev(p + *from, *to - *from);
		char_next(p + last, *to - last, &cp);
		if (!in_set(set, p + last, *to - last, cp))
			break;
		*to = last;
		if ((*to & 63) == 0 && !render_spend(r, cost))
			return false;
	}
	return true;
}

static bool strip(struct call *c, bool left, bool right)
{
	const struct value *set = &c->arg[0];
	size_t from, to;
	if (!val_given(set) || set->type == VALUE_NONE)
		set = NULL;
	else if (set->type != VALUE_STRING)
		return render_fail(c->r, "%s arg must be None or str", c->fn->name);
	return strip_range(c->r, &c->self, set, left, right, &from, &to) &&
	       string_part(c->r, &c->self, from, to, c->out);
}

static bool run_strip(struct call *c)
{
	return strip(c, true, true);
}

static bool run_lstrip(struct call *c)
{
	return strip(c, true, false);
}

static bool run_rstrip(struct call *c)
{
	return strip(c, false, true);
}

static bool run_removeprefix(struct call *c)
{
	struct value prefix;
	if (!string_arg(c, 0, &prefix))
		return false;
	bool there = c->self.s->n >= prefix.s->n && memcmp(c->self.s->p, prefix.s->p, prefix.s->n) == 0;
	return string_part(c->r, &c->self, there ? prefix.s->n : 0, c->self.s->n, c->out);
}

static bool run_removesuffix(struct call *c)
{
	struct value suffix;
	if (!string_arg(c, 0, &suffix))
		return false;
	size_t n = c->self.s->n, m = suffix.s->n;
	bool there = n >= m && memcmp(c->self.s->p + n - m, suffix.s->p, m) == 0;
	return string_part(c->r, &c->self, 0, there ? n - m : n, c->out);
}

/* ---- Searching ---- */

/* Python's optional start and end, in bytes; false in *valid when the range cannot hold even the empty string. */
static bool search_range(struct call *c, int first, size_t *from, size_t *to, bool *valid)
{
	int64_t n = (int64_t)c->self.s->n_chars, start = 0, end = n;
	if (!int_or_none_arg(c, first, &start) || !int_or_none_arg(c, first + 1, &end))
		return false;
	if (end > n)
		end = n;
	else if (end < 0)
		end = end + n < 0 ? 0 : end + n;
	if (start < 0)
		start = start + n < 0 ? 0 : start + n;
	*valid = start <= end && start <= n;
	*from = *valid ? string_offset(c->self.s, (size_t)start) : 0;
	*to = *valid ? string_offset(c->self.s, (size_t)end) : 0;
	return render_spend(c->r, c->self.s->n / 64);
}

static const char *find_last(const char *p, size_t n, const char *what, size_t m)
{
	if (m == 0)
		return p + n;
	for (size_t at = n; at >= m;) {
		const char *last = memrchr(p, what[0], at - m + 1);
		if (!last)
			return NULL;
		if (memcmp(last, what, m) == 0)
			return last;
		at = (size_t)(last - p) + m - 1;
	}
	return NULL;
}

/* The byte offset at which the first argument is found, or SIZE_MAX. */
static bool find(struct call *c, bool last, size_t *at)
{
	struct value what;
	size_t from, to;
	bool valid;
	*at = SIZE_MAX;
	if (!string_arg(c, 0, &what) || !search_range(c, 1, &from, &to, &valid))
		return false;
	if (!valid)
		return true;
	const char *p = c->self.s->p + from, *found;
	if (last) {
		/* Looks at every place where the first byte is, so it may touch every pair of bytes. */
		if (what.s->n > 1 && !render_spend(c->r, (to - from) / 64 * (what.s->n / 64 + 1)))
			return false;
		found = find_last(p, to - from, what.s->p, what.s->n);
	} else {
		found = what.s->n == 0 ? p : memmem(p, to - from, what.s->p, what.s->n);
	}
	if (found)
		*at = (size_t)(found - c->self.s->p);
	return true;
}

static bool found_index(struct call *c, size_t at, bool must)
{
	if (at == SIZE_MAX && must)
		return render_fail(c->r, "substring not found");
	*c->out = val_int(at == SIZE_MAX ? -1 : (int64_t)value_count_chars(c->self.s->p, at));
	return true;
}

static bool run_find(struct call *c)
{
	size_t at;
	return find(c, false, &at) && found_index(c, at, false);
}

static bool run_rfind(struct call *c)
{
	size_t at;
	return find(c, true, &at) && found_index(c, at, false);
}

static bool run_index(struct call *c)
{
	size_t at;
	return find(c, false, &at) && found_index(c, at, true);
}

static bool run_rindex(struct call *c)
{
	size_t at;
	return find(c, true, &at) && found_index(c, at, true);
}

static bool run_count(struct call *c)
{
	struct value what;
	size_t from, to;
	bool valid;
	int64_t n = 0;
	if (!string_arg(c, 0, &what) || !search_range(c, 1, &from, &to, &valid))
		return false;
	if (valid && what.s->n == 0) {
		n = (int64_t)value_count_chars(c->self.s->p + from, to - from) + 1;
	} else if (valid) {
		for (;;) {
			const char *found = memmem(c->self.s->p + from, to - from, what.s->p, what.s->n);
			if (!found)
				break;
			from = (size_t)(found - c->self.s->p) + what.s->n;
			n++;
		}
	}
	*c->out = val_int(n);
	return true;
}

static bool affix(struct call *c, bool at_end)
{
	size_t from, to;
	bool valid;
	const struct value *what = &c->arg[0], *items = what;
	size_t n_items = 1;
	if (what->type == VALUE_TUPLE) {
		items = what->seq->items;
		n_items = what->seq->n;
	}
	if (!search_range(c, 1, &from, &to, &valid))
		return false;
	*c->out = val_bool(false);
	for (size_t i = 0; i < n_items; i++) {
		if (items[i].type != VALUE_STRING)
			return render_fail(c->r, "%s first arg must be str or a tuple of str, not %s", c->fn->name,
					   type_name(&items[i]));
		size_t m = items[i].s->n;
		if (!render_spend(c->r, m / 64 + 1))
			return false;
		if (valid && m <= to - from && memcmp(c->self.s->p + (at_end ? to - m : from), items[i].s->p, m) == 0)
			*c->out = val_bool(true);
	}
	return true;
}

static bool run_startswith(struct call *c)
{
	return affix(c, false);
}

static bool run_endswith(struct call *c)
{
	return affix(c, true);
}

static bool run_replace(struct call *c)
{
	struct value old, new;
	int64_t left = -1;
	if (!string_arg(c, 0, &old) || !string_arg(c, 1, &new) || !int_arg(c, 2, &left))
		return false;
	if (left < 0)
		left = INT64_MAX;
	struct text t = {0};
	const char *p = c->self.s->p;
	size_t n = c->self.s->n, from = 0, at = 0;
	if (!render_spend(c->r, n / 64))
		return false;
	for (; left > 0; left--) {
		size_t hit;
		if (old.s->n == 0) {
			if (at > n)
				break;
			hit = at;
			uint32_t cp;
			at += at < n ? char_next(p + at, n - at, &cp) : 1;
		} else {
			const char *found = memmem(p + from, n - from, old.s->p, old.s->n);
			if (!found)
				break;
			hit = (size_t)(found - p);
		}
		if (!render_spend(c->r, 1) || !text_add_part(c->r, &t, &c->self, from, hit) ||
		    !text_add_value(c->r, &t, &new))
			return false;
		from = hit + old.s->n;
	}
	if (from == 0 && t.n == 0) {
		*c->out = c->self;
		return true;
	}
	return text_add_part(c->r, &t, &c->self, from, n) && text_finish(c->r, &t, c->out) && same_flags(c);
}

/* ---- Splitting and joining ---- */

static bool add_part(struct call *c, struct value *list, size_t from, size_t to)
{
	struct value part;
	return string_part(c->r, &c->self, from, to, &part) && list_add(c->r, list, part);
}

static bool split_spaces(struct call *c, struct value *list, int64_t left)
{
	const char *p = c->self.s->p;
	size_t n = c->self.s->n, i = 0;
	uint32_t cp;
	while (i < n) {
		size_t len = char_next(p + i, n - i, &cp);
		if (char_is_space(cp)) {
			i += len;
			continue;
		}
		size_t from = i;
		if (left-- == 0)
			return add_part(c, list, from, n);
		while (i < n) {
			len = char_next(p + i, n - i, &cp);
			if (char_is_space(cp))
				break;
			i += len;
		}
		if (!add_part(c, list, from, i))
			return false;
	}
	return true;
}

static bool rsplit_spaces(struct call *c, struct value *list, int64_t left)
{
	const char *p = c->self.s->p;
	size_t end = c->self.s->n;
	uint32_t cp;
	while (end > 0) {
		size_t last = char_prev(p, end);
		char_next(p + last, end - last, &cp);
		if (char_is_space(cp)) {
			end = last;
			continue;
		}
		if (left-- == 0)
			return add_part(c, list, 0, end);
		size_t from = last;
		while (from > 0) {
			size_t before = char_prev(p, from);
			char_next(p + before, from - before, &cp);
			if (char_is_space(cp))
				break;
			from = before;
		}
		if (!add_part(c, list, from, end))
			return false;
		end = from;
	}
	return true;
}

static bool split_text(struct call *c, struct value *list, const struct value *by, int64_t left)
{
	size_t from = 0;
	while (left-- > 0) {
		const char *found = memmem(c->self.s->p + from, c->self.s->n - from, by->s->p, by->s->n);
		if (!found)
			break;
		size_t at = (size_t)(found - c->self.s->p);
		if (!add_part(c, list, from, at))
			return false;
		from = at + by->s->n;
	}
	return add_part(c, list, from, c->self.s->n);
}

static bool rsplit_text(struct call *c, struct value *list, const struct value *by, int64_t left)
{
	size_t end = c->self.s->n;
	if (by->s->n > 1 && !render_spend(c->r, end / 64 * (by->s->n / 64 + 1)))
		return false;
	while (left-- > 0) {
		const char *found = find_last(c->self.s->p, end, by->s->p, by->s->n);
		if (!found)
			break;
		size_t at = (size_t)(found - c->self.s->p);
		if (!add_part(c, list, at + by->s->n, end))
			return false;
		end = at;
	}
	return add_part(c, list, 0, end);
}

static bool split(struct call *c, bool from_right)
{
	const struct value *by = &c->arg[0];
	int64_t left = -1;
	struct value list;
	if (!int_arg(c, 1, &left) || !new_list(c->r, &list) || !render_spend(c->r, c->self.s->n / 16))
		return false;
	if (left < 0)
		left = INT64_MAX;
	bool done;
	if (!val_given(by) || by->type == VALUE_NONE) {
		done = from_right ? rsplit_spaces(c, &list, left) : split_spaces(c, &list, left);
	} else if (by->type == VALUE_UNDEFINED) {
		return undefined_fail(c->r, by);
	} else if (by->type != VALUE_STRING) {
		return render_fail(c->r, "must be str or None, not %s", type_name(by));
	} else if (by->s->n == 0) {
		return render_fail(c->r, "empty separator");
	} else {
		done = from_right ? rsplit_text(c, &list, by, left) : split_text(c, &list, by, left);
	}
	for (size_t i = 0, k = list.seq->n; from_right && done && i + 1 < k; i++) {
		struct value swap = list.seq->items[i];
		list.seq->items[i] = list.seq->items[--k];
		list.seq->items[k] = swap;
	}
	*c->out = list;
	return done;
}

static bool run_split(struct call *c)
{
	return split(c, false);
}

static bool run_rsplit(struct call *c)
{
	return split(c, true);
}

static bool run_splitlines(struct call *c)
{
	bool keep = false;
	struct value list;
	const char *p = c->self.s->p;
	size_t n = c->self.s->n, from = 0;
	truth_arg(c, 0, &keep);
	if (!new_list(c->r, &list) || !render_spend(c->r, n / 16))
		return false;
	for (size_t i = 0; i < n;) {
		uint32_t cp;
		size_t end = i;
		i += char_next(p + i, n - i, &cp);
		if (!char_is_line_end(cp))
			continue;
		if (cp == '\r' && i < n && p[i] == '\n')
			i++;
		if (!add_part(c, &list, from, keep ? i : end))
			return false;
		from = i;
	}
	*c->out = list;
	return from == n || add_part(c, &list, from, n);
}

static bool partition(struct call *c, bool last)
{
	struct value by, parts[3];
	if (!string_arg(c, 0, &by))
		return false;
	if (by.s->n == 0)
		return render_fail(c->r, "empty separator");
	const char *p = c->self.s->p;
	size_t n = c->self.s->n;
	if (!render_spend(c->r, (n / 64) * (last ? by.s->n / 64 + 1 : 1)))
		return false;
	const char *found = last ? find_last(p, n, by.s->p, by.s->n) : memmem(p, n, by.s->p, by.s->n);
	size_t at = found ? (size_t)(found - p) : last ? 0 : n, after = found ? at + by.s->n : at;
	return string_part(c->r, &c->self, 0, at, &parts[0]) && string_part(c->r, &c->self, at, after, &parts[1]) &&
	       string_part(c->r, &c->self, after, n, &parts[2]) && new_tuple(c->r, parts, 3, c->out);
}

static bool run_partition(struct call *c)
{
	return partition(c, false);
}

static bool run_rpartition(struct call *c)
{
	return partition(c, true);
}

static bool run_join(struct call *c)
{
	struct text t = {0};
	struct iter it;
	struct value item;
	bool got;
	if (!value_is_iterable(&c->arg[0]))
		return render_fail(c->r, "can only join an iterable");
	if (!iter_begin(c->r, &it, &c->arg[0]))
		return false;
	for (size_t i = 0;; i++) {
		if (!iter_next(c->r, &it, &item, &got))
			return false;
		if (!got)
			break;
		if (item.type != VALUE_STRING)
			return render_fail(c->r, "sequence item %zu: expected str instance, %s found", i,
					   type_name(&item));
		if ((i && !text_add_value(c->r, &t, &c->self)) || !text_add_value(c->r, &t, &item))
			return false;
	}
	return text_finish(c->r, &t, c->out) && same_flags(c);
}

/* ---- Padding ---- */

static bool add_fill(struct render *r, struct text *t, const struct value *fill, int64_t n)
{
	for (; n > 0; n--)
		if (!render_spend(r, 1) || !(fill ? text_add_value(r, t, fill) : text_puts(r, t, " ")))
			return false;
	return true;
}

static bool justify(struct call *c, bool left, bool right)
{
	int64_t width = 0;
	struct value fill;
	const struct value *with = val_given(&c->arg[1]) ? &fill : NULL;
	if (!int_arg(c, 0, &width) || !string_arg(c, 1, &fill))
		return false;
	if (with && fill.s->n_chars != 1)
		return render_fail(c->r, "The fill character must be exactly one character long");
	int64_t missing = width - (int64_t)c->self.s->n_chars;
	if (missing <= 0) {
		*c->out = c->self;
		return true;
	}
	/* str.center() gives the odd character to the left when the width is odd. */
	int64_t before = left && right ? missing / 2 + (missing & width & 1) : left ? missing : 0;
	struct text t = {0};
	return add_fill(c->r, &t, with, before) && text_add_value(c->r, &t, &c->self) &&
	       add_fill(c->r, &t, with, missing - before) && text_finish(c->r, &t, c->out) && same_flags(c);
}

static bool run_center(struct call *c)
{
	return justify(c, true, true);
}

static bool run_ljust(struct call *c)
{
	return justify(c, false, true);
}

static bool run_rjust(struct call *c)
{
	return justify(c, true, false);
}

static bool run_zfill(struct call *c)
{
	int64_t width = 0;
	if (!int_arg(c, 0, &width))
		return false;
	bool sign = c->self.s->n && (c->self.s->p[0] == '+' || c->self.s->p[0] == '-');
	struct text t = {0};
	if (!text_add_part(c->r, &t, &c->self, 0, sign))
		return false;
	for (int64_t i = (int64_t)c->self.s->n_chars; i < width; i++)
		if (!render_spend(c->r, 1) || !text_puts(c->r, &t, "0"))
			return false;
	return text_add_part(c->r, &t, &c->self, sign, c->self.s->n) && text_finish(c->r, &t, c->out) && same_flags(c);
}

static bool run_expandtabs(struct call *c)
{
	int64_t tab = 8, column = 0;
	struct text t = {0};
	if (!int_arg(c, 0, &tab))
		return false;
	for (size_t i = 0; i < c->self.s->n;) {
		uint32_t cp;
		size_t from = i;
		i += char_next(c->self.s->p + i, c->self.s->n - i, &cp);
		if (cp == '\t') {
			int64_t n = tab > 0 ? tab - column % tab : 0;
			if (!add_fill(c->r, &t, NULL, n))
				return false;
			column += n;
			continue;
		}
		column = cp == '\n' || cp == '\r' ? 0 : column + 1;
		if (!text_add_part(c->r, &t, &c->self, from, i))
			return false;
	}
	return text_finish(c->r, &t, c->out) && same_flags(c);
}

static bool run_format(struct call *c)
{
	return format_braces(c->r, &c->self, &c->raw, c->out);
}

/* ---- Classes ---- */

/* True when there is a character, and all are of the class. */
static bool all_chars(struct call *c, bool (*is)(uint32_t))
{
	bool all = c->self.s->n > 0;
	if (!render_spend(c->r, c->self.s->n / 16))
		return false;
	for (size_t i = 0; all && i < c->self.s->n;) {
		uint32_t cp;
		i += char_next(c->self.s->p + i, c->self.s->n - i, &cp);
		all = is(cp);
	}
	*c->out = val_bool(all);
	return true;
}

static bool run_isalpha(struct call *c)
{
	return all_chars(c, char_is_alpha);
}

static bool run_isalnum(struct call *c)
{
	return all_chars(c, char_is_alnum);
}

static bool run_isdigit(struct call *c)
{
	return all_chars(c, char_is_digit);
}

static bool run_isdecimal(struct call *c)
{
	return all_chars(c, char_is_decimal);
}

static bool run_isnumeric(struct call *c)
{
	return all_chars(c, char_is_numeric);
}

static bool run_isspace(struct call *c)
{
	return all_chars(c, char_is_space);
}

static bool run_isprintable(struct call *c)
{
	if (c->self.s->n == 0) {
		*c->out = val_bool(true);
		return true;
	}
	return all_chars(c, char_is_printable);
}

static bool run_isascii(struct call *c)
{
	*c->out = val_bool(true);
	for (size_t i = 0; i < c->self.s->n; i++)
		if ((unsigned char)c->self.s->p[i] >= 0x80)
			*c->out = val_bool(false);
	return render_spend(c->r, c->self.s->n / 64);
}

static bool name_start(uint32_t cp)
{
	return cp == '_' || char_is_alpha(cp);
}

static bool name_part(uint32_t cp)
{
	return cp == '_' || char_is_alpha(cp) || char_is_decimal(cp);
}

static bool run_isidentifier(struct call *c)
{
	uint32_t cp;
	if (!all_chars(c, name_part))
		return false;
	if (c->self.s->n) {
		char_next(c->self.s->p, c->self.s->n, &cp);
		*c->out = val_bool(c->out->b && name_start(cp));
	}
	return true;
}

/* Some cased character, and none of the other case. */
static bool cased(struct call *c, bool upper)
{
	bool any = false, other = false;
	if (!render_spend(c->r, c->self.s->n / 16))
		return false;
	for (size_t i = 0; i < c->self.s->n;) {
		uint32_t cp;
		i += char_next(c->self.s->p + i, c->self.s->n - i, &cp);
		any |= upper ? char_is_upper(cp) : char_is_lower(cp);
		other |= (upper ? char_is_lower(cp) : char_is_upper(cp)) || char_is_title(cp);
	}
	*c->out = val_bool(any && !other);
	return true;
}

static bool run_isupper(struct call *c)
{
	return cased(c, true);
}

static bool run_islower(struct call *c)
{
	return cased(c, false);
}

static bool run_istitle(struct call *c)
{
	bool in_word = false, any = false, wrong = false;
	if (!render_spend(c->r, c->self.s->n / 16))
		return false;
	for (size_t i = 0; i < c->self.s->n;) {
		uint32_t cp;
		i += char_next(c->self.s->p + i, c->self.s->n - i, &cp);
		bool upper = char_is_upper(cp) || char_is_title(cp), lower = char_is_lower(cp);
		wrong |= upper ? in_word : lower && !in_word;
		in_word = upper || lower;
		any |= in_word;
	}
	*c->out = val_bool(any && !wrong);
	return true;
}

const struct builtin string_methods[] = {
	{"capitalize", "", run_capitalize},
	{"casefold", "", run_casefold},
	{"center", "width ?fillchar", run_center},
	{"count", "sub ?start end", run_count},
	{"endswith", "suffix ?start end", run_endswith},
	{"expandtabs", "?tabsize", run_expandtabs},
	{"find", "sub ?start end", run_find},
	{"format", NULL, run_format},
	{"index", "sub ?start end", run_index},
	{"isalnum", "", run_isalnum},
	{"isalpha", "", run_isalpha},
	{"isascii", "", run_isascii},
	{"isdecimal", "", run_isdecimal},
	{"isdigit", "", run_isdigit},
	{"isidentifier", "", run_isidentifier},
	{"islower", "", run_islower},
	{"isnumeric", "", run_isnumeric},
	{"isprintable", "", run_isprintable},
	{"isspace", "", run_isspace},
	{"istitle", "", run_istitle},
	{"isupper", "", run_isupper},
	{"join", "iterable", run_join},
	{"ljust", "width ?fillchar", run_ljust},
	{"lower", "", run_lower},
	{"lstrip", "?chars", run_lstrip},
	{"partition", "sep", run_partition},
	{"removeprefix", "prefix", run_removeprefix},
	{"removesuffix", "suffix", run_removesuffix},
	{"replace", "old new ?count", run_replace},
	{"rfind", "sub ?start end", run_rfind},
	{"rindex", "sub ?start end", run_rindex},
	{"rjust", "width ?fillchar", run_rjust},
	{"rpartition", "sep", run_rpartition},
	{"rsplit", "?sep maxsplit", run_rsplit},
	{"rstrip", "?chars", run_rstrip},
	{"split", "?sep maxsplit", run_split},
	{"splitlines", "?keepends", run_splitlines},
	{"startswith", "prefix ?start end", run_startswith},
	{"strip", "?chars", run_strip},
	{"swapcase", "", run_swapcase},
	{"title", "", run_title},
	{"upper", "", run_upper},
	{"zfill", "width", run_zfill},
};
const size_t n_string_methods = sizeof string_methods / sizeof *string_methods;
