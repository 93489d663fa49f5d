"""The models of a router: which one serves a request, and the runtime of each.

model_runtime.py   all of one model: files, tokenizer, grammar checker, fleet, queue, prices (costs.py)
model_selection.py `auto`: the rules, pure; model_selector.py is its shell, config.py has the settings
prompt_reading.py  a request in one model's tokens, within its limits; media.py: its pictures, sounds and videos
prompts/           text and chats to token ids; chat templates
output/            reasoning and tool calls as they are generated; texts of tokens
grammars/          grammars of requests, checked in a process that may die of them
"""
