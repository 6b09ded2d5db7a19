#include "server/auth.h"

#include <string.h>
#include <strings.h>

/* Compares all of `given` whatever differs first, so that the time tells only the length of what was sent. */
static bool same_key(struct str given, const char *key)
{
	size_t n = strlen(key);
	volatile unsigned char diff = given.n != n;
	for (size_t i = 0; i < given.n; i++)
		diff |= (unsigned char)(given.p[i] ^ key[n ? i % n : 0]);
	return diff == 0;
}

bool auth_check(const struct config *config, struct str authorization, struct str x_api_key)
{
	static const char scheme[] = "Bearer";
	size_t skip = sizeof scheme - 1;

	if (!config->api_key || !config->api_key[0])
		return true;
	if (x_api_key.p && same_key(x_api_key, config->api_key))
		return true;
	if (!authorization.p || authorization.n <= skip || strncasecmp(authorization.p, scheme, skip) != 0 ||
	    authorization.p[skip] != ' ')
		return false;
	while (skip < authorization.n && authorization.p[skip] == ' ')
		skip++;
	return same_key((struct str){authorization.p + skip, authorization.n - skip}, config->api_key);
}
