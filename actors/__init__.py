"""Thin shells around the parts that live in processes of their own: worker, LoRA table, router."""
