//! A progress bar, if standard error is a terminal.

use std::io::IsTerminal;
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::job::launch::StatusView;

/// A progress bar.
pub struct Progress {
    bar: ProgressBar,
    followed: Followed,
}

/// The PEs whose progress is shown.
#[derive(Clone, Copy, PartialEq)]
enum Followed {
    SlowestPe,
    FirstPe,
}

impl Progress {
    /// No bar.
    pub fn none() -> Progress {
        Progress { bar: ProgressBar::hidden(), followed: Followed::FirstPe }
    }

    /// Steps of the slowest PE.
    pub fn of_slowest_pe(unit: &str) -> Progress {
        Progress::new(&format!("{{bar:30}} {unit} {{pos}}/{{len}}, {{elapsed}}, {{msg}}"), Followed::SlowestPe)
    }

    /// Phases of PE 0, if all PEs run the same ones.
    pub fn of_first_pe() -> Progress {
        Progress::new("{bar:30} {pos}/{len}, {elapsed}, {msg}", Followed::FirstPe)
    }

    /// The elapsed time of work whose progress is not known.
    pub fn of_work(text: &'static str) -> Progress {
        let progress = Progress::new("{msg}, {elapsed}", Followed::FirstPe);
        progress.bar.set_message(text);
        if !progress.bar.is_hidden() {
            let bar = progress.bar.clone();
            let tick = move || {
                while !bar.is_finished() {
                    bar.tick();
                    thread::sleep(Duration::from_millis(200));
                }
            };
            // Not `enable_steady_tick`, which panics if no thread can be started. Without a thread the time is not shown.
            let _ = thread::Builder::new().spawn(tick);
        }
        progress
    }

    fn new(template: &str, followed: Followed) -> Progress {
        let target =
            if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        Progress { bar: ProgressBar::with_draw_target(None, target).with_style(style), followed }
    }

    /// Shows the current phase and progress.
    pub fn show(&self, status: &StatusView<'_>) {
        let slowest = || (0..status.n_pes()).map(|pe| status.pe(pe)).min_by_key(|status| status.done);
        let (followed, name) = match self.followed {
            Followed::SlowestPe => (slowest(), "slowest PE: "),
            Followed::FirstPe => (Some(status.pe(0)), ""),
        };
        if let Some(status) = followed {
            self.bar.set_length(status.total);
            self.bar.set_position(status.done);
            self.bar.set_message(format!("{name}{}", status.phase));
        }
    }

    /// Removes the bar.
    pub fn clear(self) {
        self.bar.finish_and_clear();
    }
}
