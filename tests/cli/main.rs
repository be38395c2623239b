//! The command as a user meets it: the jobs it does, the input it refuses, and how it ends when something dies.

#[path = "../binary/mod.rs"]
mod binary;
#[path = "../skip/mod.rs"]
mod skip;

mod bad_input;
mod ends;
mod files;
mod jobs;
mod outputs;
mod pe;
