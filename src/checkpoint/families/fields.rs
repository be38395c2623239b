//! Fields of `config.json`: names, defaults, the meaning of null, and errors.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::super::FileError;

/// A field of `config.json`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    /// The name in the configuration class, then aliases; unused entries are empty.
    names: [&'static str; 4],
    kind: Kind,
    /// Value of an absent field: the configuration class's default.
    pub default: DefaultValue,
    /// Value that null means to the model class.
    pub null: DefaultValue,
    /// Whether the field may be a list with a value per layer.
    per_layer: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Size,
    Number,
    Flag,
    Text,
}

/// A default value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum DefaultValue {
    /// Absence or null is an error.
    Required,
    /// No value, which is valid.
    Null,
    Size(usize),
    Number(f64),
    Flag(bool),
    Text(&'static str),
}

impl DefaultValue {
    /// As JSON; `None` for `Required`.
    pub fn json(self) -> Option<Value> {
        match self {
            DefaultValue::Required => None,
            DefaultValue::Null => Some(Value::Null),
            DefaultValue::Size(n) => Some(n.into()),
            DefaultValue::Number(x) => Some(x.into()),
            DefaultValue::Flag(b) => Some(b.into()),
            DefaultValue::Text(s) => Some(s.into()),
        }
    }
}

const fn field(name: &'static str, kind: Kind, default: DefaultValue) -> Field {
    Field { names: [name, "", "", ""], kind, default, null: DefaultValue::Required, per_layer: false }
}

pub(super) const fn size(name: &'static str, default: usize) -> Field {
    field(name, Kind::Size, DefaultValue::Size(default))
}

pub(super) const fn number(name: &'static str, default: f64) -> Field {
    field(name, Kind::Number, DefaultValue::Number(default))
}

pub(super) const fn flag(name: &'static str, default: bool) -> Field {
    field(name, Kind::Flag, DefaultValue::Flag(default))
}

pub(super) const fn text(name: &'static str, default: &'static str) -> Field {
    field(name, Kind::Text, DefaultValue::Text(default))
}

impl Field {
    /// Adds an alias.
    pub const fn or(mut self, name: &'static str) -> Field {
        let mut i = 1;
        while !self.names[i].is_empty() {
            i += 1;
        }
        self.names[i] = name;
        self
    }

    /// Absence is an error: the configuration class has no default, and the model class needs a value.
    pub const fn required(mut self) -> Field {
        self.default = DefaultValue::Required;
        self
    }

    /// Absence or null means no value.
    pub const fn optional(mut self) -> Field {
        self.default = DefaultValue::Null;
        self.null = DefaultValue::Null;
        self
    }

    /// Null means no value.
    pub const fn nullable(mut self) -> Field {
        self.null = DefaultValue::Null;
        self
    }

    /// Null means false.
    pub const fn null_is_false(mut self) -> Field {
        self.null = DefaultValue::Flag(false);
        self
    }

    /// Null means this number.
    pub const fn null_is(mut self, value: f64) -> Field {
        self.null = DefaultValue::Number(value);
        self
    }

    /// The field may be a list with a value per layer.
    pub const fn per_layer(mut self) -> Field {
        self.per_layer = true;
        self
    }

    /// Name in the configuration class.
    pub fn name(&self) -> &'static str {
        self.names[0]
    }

    fn expected(&self) -> &'static str {
        match self.kind {
            Kind::Size => "a non-negative integer",
            Kind::Number => "a number",
            Kind::Flag => "true or false",
            Kind::Text => "a string",
        }
    }
}

/// A configuration, as seen by one of its layers.
pub(super) struct Fields {
    pub path: PathBuf,
    /// Prefix of the fields in errors, such as `text_config.`, or empty.
    pub prefix: String,
    pub map: Map<String, Value>,
    pub layer: usize,
}

/// The value of a field: from the file with the name found, or a default.
enum Found<'a> {
    Value(&'a Value, &'a str),
    Default(DefaultValue),
}

impl Fields {
    /// The value of a name, including null; dots descend into objects.
    pub fn get(&self, name: &str) -> Option<&Value> {
        let mut parts = name.split('.');
        let first = self.map.get(parts.next()?);
        parts.fold(first, |value, part| value?.get(part))
    }

    pub fn wrong(&self, name: &str, found: impl Into<String>, expected: &str) -> FileError {
        let (file, field) = (self.path.clone(), format!("{}{name}", self.prefix));
        FileError::Field { file, field, found: found.into(), expected: expected.to_string() }
    }

    pub fn unexpected(&self, name: &str, expected: &str) -> FileError {
        match self.get(name) {
            Some(value) => self.wrong(name, format!("is {value}"), expected),
            None => self.wrong(name, "is missing", expected),
        }
    }

    fn find(&self, field: &Field) -> Result<Found<'_>, FileError> {
        let mut found: Option<(&Value, &str)> = None;
        let mut null = None;
        for name in field.names.into_iter().filter(|name| !name.is_empty()) {
            match self.get(name) {
                None => {}
                Some(Value::Null) => null = null.or(Some(name)),
                Some(value) => match found {
                    Some((other, first)) if other != value => {
                        return Err(self.unexpected(name, &format!("the same as {first}")));
                    }
                    Some(_) => {}
                    None => found = Some((value, name)),
                },
            }
        }
        let default = if null.is_some() { field.null } else { field.default };
        match (found, default) {
            (Some((value, name)), _) => Ok(Found::Value(value, name)),
            (None, DefaultValue::Required) => Err(self.unexpected(null.unwrap_or(field.name()), field.expected())),
            (None, default) => Ok(Found::Default(default)),
        }
    }

    fn read<'a, T>(
        &'a self,
        field: &Field,
        parse: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Result<T, DefaultValue>, FileError> {
        match self.find(field)? {
            Found::Default(default) => Ok(Err(default)),
            Found::Value(mut value, name) => {
                if let (true, Some(list)) = (field.per_layer, value.as_array()) {
                    let missing = || self.unexpected(name, "a value for each layer");
                    value = list.get(self.layer).ok_or_else(missing)?;
                }
                parse(value).map(Ok).ok_or_else(|| self.unexpected(name, field.expected()))
            }
        }
    }

    /// A size, or `None` if the field has no value.
    pub fn size_or_none(&self, field: &Field) -> Result<Option<usize>, FileError> {
        let value = self.read(field, |v| v.as_u64().and_then(|v| usize::try_from(v).ok()))?;
        Ok(match value {
            Ok(size) => Some(size),
            Err(DefaultValue::Size(size)) => Some(size),
            Err(_) => None,
        })
    }

    pub fn size(&self, field: &Field) -> Result<usize, FileError> {
        self.size_or_none(field)?.ok_or_else(|| self.unexpected(field.name(), field.expected()))
    }

    /// A number, or `None` if the field has no value.
    pub fn number_or_none(&self, field: &Field) -> Result<Option<f64>, FileError> {
        Ok(match self.read(field, Value::as_f64)? {
            Ok(number) => Some(number),
            Err(DefaultValue::Number(number)) => Some(number),
            Err(_) => None,
        })
    }

    pub fn number(&self, field: &Field) -> Result<f64, FileError> {
        self.number_or_none(field)?.ok_or_else(|| self.unexpected(field.name(), field.expected()))
    }

    pub fn flag(&self, field: &Field) -> Result<bool, FileError> {
        Ok(match self.read(field, Value::as_bool)? {
            Ok(flag) => flag,
            Err(default) => default == DefaultValue::Flag(true),
        })
    }

    pub fn text(&self, field: &Field) -> Result<&str, FileError> {
        match self.read(field, Value::as_str)? {
            Ok(text) | Err(DefaultValue::Text(text)) => Ok(text),
            Err(_) => Err(self.unexpected(field.name(), field.expected())),
        }
    }

    /// A list, or `None` if it is absent or null.
    pub fn list(&self, name: &str, expected: &str) -> Result<Option<&Vec<Value>>, FileError> {
        match self.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_array().map(Some).ok_or_else(|| self.unexpected(name, expected)),
        }
    }

    /// A list of sizes, or `None` if it is absent or null.
    pub fn sizes(&self, name: &str) -> Result<Option<Vec<usize>>, FileError> {
        const EXPECTED: &str = "a list of non-negative integers";
        let Some(list) = self.list(name, EXPECTED)? else { return Ok(None) };
        let sizes: Option<Vec<usize>> = list.iter().map(|v| v.as_u64().map(|v| v as usize)).collect();
        sizes.map(Some).ok_or_else(|| self.unexpected(name, EXPECTED))
    }
}
