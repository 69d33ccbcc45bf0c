//! What can be shown of the engine itself.
