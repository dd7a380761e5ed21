//! Enumerations in the form of HNS.

/// An enumeration that HNS writes as a word and reads as a word in any case, or as a number (docs/hns.md, Documents).
/// The first value is 0, which HNS may omit in an answer.
macro_rules! wire_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $value:ident = $number:literal $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$doc])* $value,)*
            /// An unknown value, as it was written.
            Unknown(String),
        }

        impl $name {
            /// The value's name in a document.
            pub fn as_str(&self) -> &str {
                match self { $($name::$value => $text,)* $name::Unknown(text) => text }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> $name {
                $(if text.eq_ignore_ascii_case($text) { return $name::$value; })*
                $name::Unknown(text.to_owned())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<$name, D::Error> {
                match serde_json::Value::deserialize(deserializer)? {
                    serde_json::Value::String(text) => Ok($name::from(text.as_str())),
                    serde_json::Value::Number(number) => Ok(match number.as_u64() {
                        $(Some($number) => $name::$value,)*
                        _ => $name::Unknown(number.to_string()),
                    }),
                    other => Err(serde::de::Error::custom(format!(
                        "{other} is not a value of {}: a word or a number is needed", stringify!($name)
                    ))),
                }
            }
        }

        impl $crate::schema::Strict for $name {
            fn check(&self, at: &str) -> Result<(), $crate::schema::DocumentError> {
                match self {
                    $name::Unknown(text) => Err($crate::schema::DocumentError {
                        at: at.to_owned(),
                        what: format!("{text:?} is not a value of {}", stringify!($name)),
                    }),
                    _ => Ok(()),
                }
            }
        }
    };
}
pub(crate) use wire_enum;
