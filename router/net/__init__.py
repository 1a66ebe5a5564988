"""The only IO of the router: HTTP ingress and relay, event subscriptions, tokenizer."""
