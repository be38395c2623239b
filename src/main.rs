//! The `aristos` command.

fn main() -> std::process::ExitCode {
    aristos::cli::main()
}
