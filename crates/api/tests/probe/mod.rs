//! Finds the fields that a type reads, through its `Deserialize`.
//!
//! A deserializer that is asked for a struct gets the names of its fields. Each field is followed in a separate run:
//! the run gives the type only the path to that field, and ends with an error there.

use std::cell::RefCell;

use serde::de::value::{Error, StrDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error as _, IntoDeserializer, MapAccess, SeqAccess,
    Visitor,
};

/// A field that a type reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Read {
    /// Its path, as `spec.ingress[].action`.
    pub path: String,
}

/// The maximum depth.
const DEEPEST: usize = 8;

/// Every field that `T` reads.
pub(crate) fn read_by<T: DeserializeOwned>() -> Vec<Read> {
    let mut found = Vec::new();
    follow::<T>(&mut Vec::new(), &mut found);
    found.retain(|field: &Read| !field.path.starts_with("metadata."));
    found
}

fn follow<T: DeserializeOwned>(steps: &mut Vec<Step>, found: &mut Vec<Read>) {
    let seen = RefCell::new(Vec::new());
    let _ = T::deserialize(Probe { steps, seen: &seen });
    let seen = seen.into_inner();
    if seen.is_empty() && !steps.is_empty() {
        found.push(Read { path: shown(steps) });
        return;
    }
    for step in seen {
        if steps.len() >= DEEPEST {
            found.push(Read { path: shown(steps) });
            return;
        }
        steps.push(step);
        follow::<T>(steps, found);
        steps.pop();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Field(&'static str),
    Item,
}

fn shown(steps: &[Step]) -> String {
    steps.iter().fold(String::new(), |path, step| match step {
        Step::Field(name) if path.is_empty() => (*name).to_owned(),
        Step::Field(name) => format!("{path}.{name}"),
        Step::Item => format!("{path}[]"),
    })
}

#[derive(Clone, Copy)]
struct Probe<'a> {
    steps: &'a [Step],
    seen: &'a RefCell<Vec<Step>>,
}

impl Probe<'_> {
    fn end<T>() -> Result<T, Error> {
        Err(Error::custom("the end of the way"))
    }
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Self::end()
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.steps.split_first() {
            None => {
                self.seen.borrow_mut().push(Step::Item);
                Self::end()
            }
            Some((_, steps)) => visitor.visit_seq(One(Probe { steps, ..self })),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.steps.split_first() {
            None => {
                self.seen.borrow_mut().extend(fields.iter().map(|name| Step::Field(name)));
                Self::end()
            }
            Some((Step::Field(name), steps)) => {
                visitor.visit_map(OneField { name: Some(name), value: Probe { steps, ..self } })
            }
            Some((Step::Item, _)) => Self::end(),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct tuple
        tuple_struct map enum identifier ignored_any
    }
}

struct One<'a>(Probe<'a>);

impl<'de> SeqAccess<'de> for One<'_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        seed.deserialize(self.0).map(Some)
    }
}

struct OneField<'a> {
    name: Option<&'static str>,
    value: Probe<'a>,
}

impl<'de> MapAccess<'de> for OneField<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        let Some(name) = self.name.take() else { return Ok(None) };
        let name: StrDeserializer<'_, Error> = name.into_deserializer();
        seed.deserialize(name).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        seed.deserialize(self.value)
    }
}
