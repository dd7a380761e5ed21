//! Finds out what a type reads, through its `Deserialize`.
//!
//! A deserializer that is asked for a struct gets the names of its fields. Each field is followed in a separate run:
//! the run gives the type only the path to that field, and ends with an error there.

use std::cell::RefCell;

use serde::de::value::{Error, StrDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Error as _, IntoDeserializer, MapAccess,
    SeqAccess, VariantAccess, Visitor,
};

/// What a type reads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Shape {
    /// `true` or `false`.
    Bool,
    /// An integer in a range.
    Integer(i64, i64),
    /// Any number.
    Number,
    /// A text, which the type may parse.
    Text,
    /// One of these words.
    Words(Vec<&'static str>),
    /// A list.
    List(Box<Shape>),
    /// A mapping whose keys are data.
    Map(Box<Shape>),
    /// A mapping of known fields.
    Struct(Vec<(&'static str, Shape)>),
    /// A value that the type inspects itself.
    Any,
}

/// A field that a type reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Read {
    /// Its path, as `spec.ingress[].action`.
    pub path: String,
}

/// The maximum depth.
const DEEPEST: usize = 12;

/// Every field that `T` reads, except those of `metadata`.
pub(crate) fn read_by<T: DeserializeOwned>() -> Vec<Read> {
    let mut found = Vec::new();
    leaves(&shape_of::<T>(), String::new(), &mut found);
    found.retain(|field: &Read| !field.path.starts_with("metadata."));
    found
}

fn leaves(shape: &Shape, path: String, found: &mut Vec<Read>) {
    match shape {
        Shape::List(item) => leaves(item, format!("{path}[]"), found),
        Shape::Struct(fields) => {
            for (name, shape) in fields {
                let path = if path.is_empty() { (*name).to_owned() } else { format!("{path}.{name}") };
                leaves(shape, path, found);
            }
        }
        _ => found.push(Read { path }),
    }
}

/// What `T` reads.
pub(crate) fn shape_of<T: DeserializeOwned>() -> Shape {
    follow::<T>(&mut Vec::new())
}

/// What `T` reads at the end of the way.
fn follow<T: DeserializeOwned>(way: &mut Vec<Step>) -> Shape {
    if way.len() > DEEPEST {
        return Shape::Any;
    }
    let seen = RefCell::new(None);
    let _ = T::deserialize(Probe { way, seen: &seen });
    let mut below = |step| {
        way.push(step);
        let shape = follow::<T>(way);
        way.pop();
        shape
    };
    match seen.into_inner() {
        None => Shape::Any,
        Some(Seen::Leaf(shape)) => shape,
        Some(Seen::List) => Shape::List(Box::new(below(Step::Item))),
        Some(Seen::Map) => Shape::Map(Box::new(below(Step::Value))),
        Some(Seen::Struct(fields)) => {
            Shape::Struct(fields.iter().map(|name| (*name, below(Step::Field(name)))).collect())
        }
        Some(Seen::Enum(variants)) => {
            let shapes = variants.iter().map(|name| (*name, below(Step::Variant(name))));
            let shapes: Vec<(&str, Shape)> = shapes.collect();
            // A variant without data is read as a word; the others are fields with their names.
            match shapes.iter().filter(|(name, shape)| *shape == Shape::Words(vec![name])).count() {
                0 => Shape::Struct(shapes),
                words if words == shapes.len() => Shape::Words(variants.to_vec()),
                _ => Shape::Any,
            }
        }
    }
}

/// What the type asked for at the end of the way.
enum Seen {
    Leaf(Shape),
    List,
    Map,
    Struct(&'static [&'static str]),
    Enum(&'static [&'static str]),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Field(&'static str),
    Item,
    Value,
    Variant(&'static str),
}

#[derive(Clone, Copy)]
struct Probe<'a> {
    way: &'a [Step],
    seen: &'a RefCell<Option<Seen>>,
}

impl<'a> Probe<'a> {
    /// Notes what the type asks for if this is the end of the way; otherwise returns the next step, and the rest.
    fn at(self, seen: Seen) -> Result<(Step, Probe<'a>), Error> {
        match self.way.split_first() {
            Some((step, way)) => Ok((*step, Probe { way, ..self })),
            None => {
                *self.seen.borrow_mut() = Some(seen);
                Err(Error::custom("the end of the way"))
            }
        }
    }

    fn leaf<T>(self, shape: Shape) -> Result<T, Error> {
        self.at(Seen::Leaf(shape))?;
        Err(Error::custom("a way behind its end"))
    }
}

/// Methods of a deserializer at which a way ends.
macro_rules! leaves {
    ($($method:ident $shape:expr),* $(,)?) => {
        $(fn $method<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            self.leaf($shape)
        })*
    };
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Error;

    leaves! {
        deserialize_any Shape::Any,
        deserialize_ignored_any Shape::Any,
        deserialize_bool Shape::Bool,
        deserialize_i8 Shape::Integer(i8::MIN.into(), i8::MAX.into()),
        deserialize_i16 Shape::Integer(i16::MIN.into(), i16::MAX.into()),
        deserialize_i32 Shape::Integer(i32::MIN.into(), i32::MAX.into()),
        deserialize_i64 Shape::Integer(i64::MIN, i64::MAX),
        deserialize_u8 Shape::Integer(0, u8::MAX.into()),
        deserialize_u16 Shape::Integer(0, u16::MAX.into()),
        deserialize_u32 Shape::Integer(0, u32::MAX.into()),
        deserialize_u64 Shape::Integer(0, i64::MAX),
        deserialize_f32 Shape::Number,
        deserialize_f64 Shape::Number,
        deserialize_char Shape::Text,
        deserialize_str Shape::Text,
        deserialize_string Shape::Text,
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
        let (_, rest) = self.at(Seen::List)?;
        visitor.visit_seq(One(rest))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let (_, rest) = self.at(Seen::Map)?;
        visitor.visit_map(OneField { name: Some("key"), value: rest })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.at(Seen::Struct(fields))? {
            (Step::Field(name), rest) => visitor.visit_map(OneField { name: Some(name), value: rest }),
            _ => Err(Error::custom("a way of another type")),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.at(Seen::Enum(variants))? {
            (Step::Variant(name), rest) => visitor.visit_enum(OneVariant { name, value: rest }),
            _ => Err(Error::custom("a way of another type")),
        }
    }

    serde::forward_to_deserialize_any! {
        i128 u128 bytes byte_buf unit unit_struct tuple tuple_struct identifier
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

struct OneVariant<'a> {
    name: &'static str,
    value: Probe<'a>,
}

impl<'de> EnumAccess<'de> for OneVariant<'_> {
    type Error = Error;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Error> {
        let name: StrDeserializer<'_, Error> = self.name.into_deserializer();
        Ok((seed.deserialize(name)?, self))
    }
}

impl<'de> VariantAccess<'de> for OneVariant<'_> {
    type Error = Error;

    fn unit_variant(self) -> Result<(), Error> {
        self.value.leaf(Shape::Words(vec![self.name]))
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, Error> {
        seed.deserialize(self.value)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, Error> {
        self.value.leaf(Shape::Any)
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.value.deserialize_struct(self.name, fields, visitor)
    }
}
