//! Replaces the fields that errors of the core name by the command's flags.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use crate::plan::InputError;

static FLAGS: OnceLock<BTreeSet<String>> = OnceLock::new();

/// Stores the flags of a command and its subcommands.
pub fn learn(command: &clap::Command) {
    FLAGS.get_or_init(|| all_flags(command));
}

/// Replaces fields in backticks by flags: "`tile_rows` is 0" becomes "--tile-rows is 0". Other words in backticks stay.
pub fn as_flags(line: &str) -> String {
    let is_flag = |word: &str| FLAGS.get().is_some_and(|flags| flags.contains(word));
    let mut text = String::new();
    let mut parts = line.split('`');
    text += parts.next().unwrap_or_default();
    while let Some(word) = parts.next() {
        let (flag, after) = (word.replace('_', "-"), parts.next());
        match after {
            Some(after) if is_flag(&flag) => text += &format!("--{flag}{after}"),
            Some(after) => text += &format!("`{word}`{after}"),
            None => text += &format!("`{word}"),
        }
    }
    text
}

/// Marks an error about flags, not about a file, so that its fields are shown as flags.
pub fn of_flags(error: InputError) -> anyhow::Error {
    anyhow::anyhow!("{error}")
}

fn all_flags(command: &clap::Command) -> BTreeSet<String> {
    let own = command.get_arguments().filter_map(|arg| arg.get_long()).map(str::to_string);
    own.chain(command.get_subcommands().flat_map(all_flags)).collect()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn fields_become_flags_and_other_words_stay() {
        learn(&crate::cli::Cli::command());
        for (line, shown) in [
            ("`steps` is 0, expected at least 1", "--steps is 0, expected at least 1"),
            ("`inject` slow-pe: PE 4, expected one below `pes`", "--inject slow-pe: PE 4, expected one below --pes"),
            ("`compute_us` is NaN", "--compute-us is NaN"),
            ("use `cargo build`, `wings` or `pes", "use `cargo build`, `wings` or `pes"),
            ("no backticks", "no backticks"),
        ] {
            assert_eq!(as_flags(line), shown);
        }
    }
}
