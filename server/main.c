/*
 * kvasir: the commands of the program, one row each.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "server/cli.h"

static int cmd_version(int argc, char **argv);
static int cmd_help(int argc, char **argv);

struct command {
	const char *name;
	int (*run)(int argc, char **argv);
	const char *about;
};

static const struct command commands[] = {
#ifdef HAVE_SERVER
	{"serve", cli_serve, "run the daemon: REST, SSE and WebSocket on one port"},
	{"health", cli_health, "ask a daemon whether it takes work, or lives"},
#endif
	{"generate", cli_generate, "stream one answer to a prompt"},
	{"chunk", cli_chunk, "answer for a document that is longer than the context, in parts"},
	{"inspect", cli_inspect, "describe a model file"},
	{"bench", cli_bench, "measure prefill and decode against the machine's read bandwidth"},
	{"plan", cli_plan, "say what memory a model and its conversations will take"},
#ifdef HAVE_JANSSON
	{"tokenize", cli_tokenize, "turn text into token ids"},
	{"render", cli_render, "apply a chat template to conversations"},
	{"replay", cli_replay, "compare eviction policies on a trace of prompts"},
#endif
	{"version", cmd_version, "print the version"},
	{"help", cmd_help, "print this; `kvasir help COMMAND` or `kvasir COMMAND --help` for more"},
};

static const struct command *find_command(const char *name)
{
	for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
		if (strcmp(commands[i].name, name) == 0)
			return &commands[i];
	return NULL;
}

static int cmd_version(int argc, char **argv)
{
	(void)argc;
	(void)argv;
	puts("kvasir " KVASIR_VERSION);
	return CLI_OK;
}

static int cmd_help(int argc, char **argv)
{
	const struct command *c = argc > 1 ? find_command(argv[1]) : NULL;
	if (c && c->run != cmd_help && c->run != cmd_version) {
		char help[] = "--help";
		char *args[] = {argv[1], help, NULL};
		return c->run(2, args);
	}
	if (argc > 1 && !c)
		return cli_misuse("there is no command \"%s\"; try: kvasir help", argv[1]);
	puts("kvasir serves a language model from a GGUF file.\n\n"
	     "usage: kvasir COMMAND [options]     kvasir --model FILE is short for kvasir serve --model FILE\n");
	for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
		printf("  %-10s %s\n", commands[i].name, commands[i].about);
	return CLI_OK;
}

/* A file or socket that got one of the standard numbers would be read as input, or receive the log. */
static void keep_standard_numbers(void)
{
	int fd;
	do
		fd = open("/dev/null", O_RDWR);
	while (fd >= 0 && fd <= STDERR_FILENO);
	if (fd >= 0)
		close(fd);
}

int main(int argc, char **argv)
{
	keep_standard_numbers();
	if (argc < 2) {
		cmd_help(1, argv);
		return CLI_USAGE;
	}
	if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
		return cmd_help(1, argv);
	if (strcmp(argv[1], "--version") == 0)
		return cmd_version(1, argv);
#ifdef HAVE_SERVER
	if (strncmp(argv[1], "--", 2) == 0)
		return cli_serve(argc, argv);
#endif
	const struct command *c = find_command(argv[1]);
	if (!c)
		return cli_misuse("there is no command \"%s\"; try: kvasir help", argv[1]);
	return c->run(argc - 1, argv + 1);
}
