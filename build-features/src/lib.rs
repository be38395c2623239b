//! Empty; the manifest says what for.
