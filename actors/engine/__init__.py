"""Everything that touches SGLang: how it is started, what is plugged into it, how it is asked."""
