"""The models a router serves: which one a request goes to, and what belongs to each.

served_model.py    all of one model: files, tokenizer, grammar checker, fleet, line
choice.py          `auto`: the rules, pure; chooser.py is its shell, costs.py what a token costs, config.py the settings
prompts.py         text and chats to token ids; chat_template.py says what a template is given
grammar_checker.py grammars are checked in grammar_process.py, a process that may die of them
"""
