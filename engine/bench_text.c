#include "engine/bench_text.h"

#include <stdio.h>

#include "engine/tools.h"

static const char *const names[] = {"Ada",   "Boris", "Clara",  "David", "Elena", "Farid", "Greta",  "Hugo",
                                    "Ines",  "Jonas", "Kira",   "Liam",  "Mona",  "Nils",  "Olga",   "Pavel",
                                    "Quinn", "Rosa",  "Stefan", "Tara",  "Ugo",   "Vera",  "Walter", "Yara"};
static const char *const things[] = {"a copper lamp",     "three letters",     "the old map",    "a basket of pears",
                                     "two ropes",         "the station clock", "a box of nails", "some dry wood",
                                     "the blue ledger",   "a broken oar",      "fresh bread",    "a wool coat",
                                     "the spare key",     "a jar of honey",    "seven stamps",   "the long ladder",
                                     "a sack of flour",   "a silver spoon",    "an empty cage",  "the last photograph",
                                     "a bundle of reeds", "a torn sail",       "the brass bell", "white paint"};
static const char *const places[] = {"the mill",      "the harbour", "the market",      "the north gate",
                                     "the school",    "the bakery",  "the river bank",  "the library",
                                     "the old tower", "the garden",  "the workshop",    "the bridge",
                                     "the inn",       "the orchard", "the post office", "the chapel",
                                     "the quarry",    "the ferry",   "the barn",        "the town hall"};
static const char *const times[] = {
	"in the morning",  "before noon",           "after the rain",       "on the third day",    "at dusk",
	"in early spring", "during the feast",      "when the wind turned", "late in the evening", "a week later",
	"on market day",   "while the others slept"};
static const char *const weathers[] = {"quiet", "cold", "bright", "windy", "dull", "warm", "foggy", "still"};
static const char *const doors[ENGINE_LONG_KEYS_MAX] = {"red",   "blue",   "green", "yellow", "black",  "white",
                                                        "brown", "purple", "grey",  "golden", "silver", "orange",
                                                        "pink",  "wooden", "iron",  "glass"};

/* splitmix64 (Steele, Lea and Flood, 2014). */
static uint64_t next(uint64_t *seed)
{
	uint64_t z = *seed += 0x9E3779B97F4A7C15u;
	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
	z = (z ^ z >> 27) * 0x94D049BB133111EBu;
	return z ^ z >> 31;
}

#define PICK(list, seed) (list)[next(seed) % (sizeof(list) / sizeof *(list))]

void bench_text_sentence(struct buf *out, uint64_t *seed)
{
	const char *who = PICK(names, seed), *other = PICK(names, seed), *what = PICK(things, seed),
		   *where = PICK(places, seed), *when = PICK(times, seed), *weather = PICK(weathers, seed);
	unsigned n = (unsigned)(2 + next(seed) % 40);
	switch (next(seed) % 8) {
	case 0:
		buf_printf(out, "%s carried %s to %s %s.", who, what, where, when);
		break;
	case 1:
		buf_printf(out, "%s asked %s about %s, but nobody at %s had seen it.", who, other, what, where);
		break;
	case 2:
		buf_printf(out, "It was %s at %s, and %s waited there for %u minutes.", weather, where, who, n);
		break;
	case 3:
		buf_printf(out, "For %s, %s paid %u coins to %s.", what, who, n, other);
		break;
	case 4:
		buf_printf(out, "Between %s and %s lies a path that %s knew well.", where, PICK(places, seed), who);
		break;
	case 5:
		buf_printf(out, "\"We should leave %s here,\" said %s, and %s agreed.", what, who, other);
		break;
	case 6:
		buf_printf(out, "%s found %s behind %s %s.", who, what, where, when);
		break;
	default:
		buf_printf(out, "%s wrote to %s that the air at %s was %s.", who, other, where, weather);
		break;
	}
	buf_putc(out, next(seed) % 7 == 0 ? '\n' : ' ');
}

struct bench_key bench_text_key(int32_t i, uint64_t seed)
{
	struct bench_key key = {.door = doors[i]};
	seed = seed * 1000 + (uint64_t)i;
	snprintf(key.digits, sizeof key.digits, "%05u", (unsigned)(10000 + next(&seed) % 90000));
	return key;
}
