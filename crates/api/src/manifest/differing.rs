//! Objects that manifests give in two forms.

use super::unread::{self, CouldChange};
use super::{Object, Origin};

/// An object that is given in two forms, of which the later one counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Differing {
    /// Kind, namespace and name.
    pub object: String,
    /// The place of the form that counts.
    pub origin: Origin,
    /// Both places, in words.
    pub problem: String,
    /// Verdicts that could be others with the other form.
    pub could_change: CouldChange,
}

impl Differing {
    pub(super) fn new(object: String, first: &Object, second: &Object) -> Self {
        let (one, other) = (unread::could_change(&first.value), unread::could_change(&second.value));
        Self::at(object, &first.origin, &second.origin, one.and(other))
    }

    pub(super) fn at(object: String, first: &Origin, second: &Origin, could_change: CouldChange) -> Self {
        let problem = format!("is given twice, and differently, at {first} and {second}: the latter counts");
        Self { object, origin: second.clone(), problem, could_change }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Offline;
    use super::*;

    #[test]
    fn endpoints_that_are_given_twice_with_other_addresses_differ() {
        let endpoints = |address: &str| {
            format!(
                "---\n{{apiVersion: v1, kind: Endpoints, metadata: {{name: db, namespace: shop}}, subsets: [{{addresses: [{{ip: {address}}}], ports: [{{port: 80}}]}}]}}\n"
            )
        };
        let service = "---\n{apiVersion: v1, kind: Service, metadata: {name: db, namespace: shop}, spec: {ports: [{port: 80}]}}\n";
        for (second, differs) in [("203.0.113.7", false), ("203.0.113.8", true)] {
            let text = [service, &endpoints("203.0.113.7"), &endpoints(second)].concat();
            let mut offline = Offline::default();
            offline.read("c.yml", &text).unwrap();
            let settled = offline.settled();
            let found: Vec<_> =
                settled.differing.iter().map(|two| (two.object.as_str(), &two.could_change)).collect();
            let service = CouldChange::Service { namespace: "shop".to_owned(), name: "db".to_owned() };
            let expected = if differs { vec![("Endpoints shop/db", &service)] } else { Vec::new() };
            assert_eq!(found, expected, "{second}");
            // The latter counts, once.
            let slices =
                settled.objects.iter().filter(|object| object.key.kind == crate::Kind::EndpointSlice);
            let slices: Vec<_> = slices.map(|slice| slice.value.to_string()).collect();
            assert!(slices.len() == 1 && slices[0].contains(second), "{slices:?}");
        }
        let mut strict = Offline::strict();
        let problems =
            strict.read("c.yml", &[endpoints("203.0.113.7"), endpoints("203.0.113.7")].concat()).unwrap_err();
        assert!(problems[0].problem.contains("the object was given before, at c.yml:2"), "{problems:?}");
    }
}
