"""The offline API: `DashEngine`, prompts in and completions out, on a thread of its own."""
