//! A model family, a row of the table.

use std::fmt;

use serde_json::Value;

use super::table::FAMILIES;
use super::{Entry, Layout};

/// A model family whose checkpoints can be read.
#[derive(Clone, Copy)]
pub struct Family(pub(super) &'static Entry);

impl Family {
    /// All families, in the order of `docs/families.md`.
    pub fn all() -> impl Iterator<Item = Family> {
        FAMILIES.iter().map(Family)
    }

    /// The family with this `model_type` in `config.json`, of the text model or of a model that contains it.
    pub fn named(model_type: &str) -> Option<Family> {
        Self::all().find(|family| family.model_types().any(|name| name == model_type))
    }

    /// The `model_type` of the text model.
    pub fn model_type(self) -> &'static str {
        self.0.model_type
    }

    /// All `model_type`s of the family.
    pub fn model_types(self) -> impl Iterator<Item = &'static str> {
        std::iter::once(self.0.model_type)
            .chain(self.0.wrapper.map(|w| w.model_type))
            .chain(self.0.aliases.iter().copied())
    }

    /// The fields that are read, as (name in the configuration class, value if absent, value if null); `None` if that
    /// is an error.
    pub fn fields(self) -> Vec<(&'static str, Option<Value>, Option<Value>)> {
        let fields = self.0.fields().into_iter().filter(|field| !field.name().is_empty());
        fields.map(|field| (field.name(), field.default.json(), field.null.json())).collect()
    }

    pub(in crate::checkpoint) fn layouts(self) -> &'static [Layout] {
        self.0.layouts
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Family) -> bool {
        self.model_type() == other.model_type()
    }
}

impl Eq for Family {}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}
