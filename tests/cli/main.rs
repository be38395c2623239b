//! The command line: valid jobs, refused input, and how a job ends after a failure.

#[path = "../binary/mod.rs"]
mod binary;
#[path = "../skip/mod.rs"]
mod skip;

mod bad_input;
mod cpu;
mod ends;
mod files;
mod jobs;
mod non_finite;
mod outputs;
mod pe;
