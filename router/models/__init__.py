"""The models of a router: which one serves a request, and the runtime of each.

model_runtime.py   all of one model: files, tokenizer, grammar checker, fleet, queue, prices (costs.py)
model_selection.py `auto`: the rules, pure; model_selector.py is its shell, config.py has the settings
prompts.py         text and chats to token ids; chat_template.py renders templates; prompt_reading.py checks
grammar_checker.py checks grammars in grammar_process.py, a process that may die of them
"""
