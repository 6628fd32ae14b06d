// Empty: a precompiled header is built with a target, and a target has a source.
