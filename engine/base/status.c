#include "engine/base/status.h"

#include <stdio.h>

const char *status_text(enum status status)
{
	switch (status) {
#define X(name, text)                                                                                                  \
	case STATUS_##name:                                                                                            \
		return text;
		STATUS_MAP(X)
#undef X
	}
	return "unknown status";
}

static enum status set(struct error *err, enum status status, const char *param, const char *fmt, va_list args)
{
	if (!err)
		return status;
	err->status = status;
	snprintf(err->param, sizeof err->param, "%s", param);
	vsnprintf(err->message, sizeof err->message, fmt, args);
	return status;
}

enum status error_set(struct error *err, enum status status, const char *fmt, ...)
{
	va_list args;
	va_start(args, fmt);
	set(err, status, "", fmt, args);
	va_end(args);
	return status;
}

enum status error_set_param(struct error *err, enum status status, const char *param, const char *fmt, ...)
{
	va_list args;
	va_start(args, fmt);
	set(err, status, param, fmt, args);
	va_end(args);
	return status;
}
