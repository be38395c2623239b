//! The files of Aristos: clusters, workloads, routing, and the shapes of models.
//!
//! Every error of a file is one line that names the file, the field, its value, and the values allowed.
//!
//! Units are those of the files: ms, MB of 10^6 bytes, FLOP per ms.

pub mod cluster;
mod error;
mod json;
mod model;
pub mod routing;
mod timeline;
mod transformer;
pub mod workload;

pub use error::InputError;
pub use json::{Count, Number, Range, parse_json, read_text};
pub use model::{Batch, MODELS, Model};
pub use timeline::Span;
pub use transformer::{Latent, Transformer};
pub use workload::Workload;
