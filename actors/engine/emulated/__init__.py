"""An engine without a GPU, for scale and faults: SGLang's scheduling, cache and events, in a profile's time."""
