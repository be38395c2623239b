//! The `aristos` command.

#[global_allocator]
static ALLOCATOR: aristos::out_of_memory::EndingAllocator = aristos::out_of_memory::EndingAllocator;

fn main() -> std::process::ExitCode {
    aristos::cli::main()
}
