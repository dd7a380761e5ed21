//! The Kubernetes backend: core kinds as they are, and Calico's kinds and node reports as CustomResourceDefinitions.
//! Calico's are in one of two groups ([`CalicoGroup`]).
//!
//! Versions are resourceVersions. Positions are the same numbers, which have an order within a kind (KEP-5504). As in
//! Calico, WorkloadEndpoints are derived from Pods, and Profiles from Namespaces and ServiceAccounts; they have the versions
//! and positions of these objects.

mod answer;
mod client;
mod connection;
mod detection;
mod endpoints;
mod envelope;
mod evictions;
mod group;
mod ipam;
mod objects;
pub(crate) mod parsers;
mod profiles;
mod publish;
mod resources;
mod secrets;
mod trim;
mod values;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use futures::{StreamExt, stream};
use http::Method;
use http::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use serde_json::{Value, json};
use tortie_api::manifest::Object;
use tortie_api::support;
use tortie_api::{Key, Kind, Position, Positions};

use answer::Operation;
use client::request;
pub use client::{Kubernetes, KubernetesConfig};
pub use group::CalicoGroup;
pub use objects::ObjectError;
pub use profiles::profile_of;
use trim::Keep;
use values::Decoded;

use crate::follow::{Event, Follow, Source, Watch, follow};
use crate::{
    Applied, Interest, Page, PageToken, Store, StoreError, Stored, Unfinished, Version, Write, Written,
};

/// The maximum number of objects in a page.
const MAX_PAGE: usize = 500;
/// The maximum number of objects without their contents in a page.
const MAX_METADATA_PAGE: usize = 5_000;
/// Lists objects without their contents.
const METADATA_ONLY: HeaderValue =
    HeaderValue::from_static("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1");

/// How many independent writes are sent at the same time.
const WRITES_AT_ONCE: usize = 16;

/// A patch by server-side apply. JSON is YAML, too.
const APPLY_PATCH: HeaderValue = HeaderValue::from_static("application/apply-patch+yaml");

impl Kubernetes {
    /// Sends one object and returns the stored one.
    async fn write(
        &self,
        verb: &'static str,
        key: &Key,
        value: Value,
        expected: Option<&Version>,
    ) -> Result<Stored, StoreError> {
        refuse_derived(key)?;
        let group = self.group_of(key.kind).await?;
        let (method, path) = match expected {
            None => (Method::POST, resources::path(group, key.kind, &key.namespace)),
            Some(_) => (Method::PUT, resources::object_path(group, key)),
        };
        let path = path.ok_or(StoreError::KindAbsent(key.kind))?;
        let object = values::encode(group, key, value, expected)?;
        let request = request(method, &path, object.to_string().into_bytes());
        let written = self.call(&of_object(verb, key, group), request).await?;
        let stored = stored(key, values::decode(group, key.kind, written)?)?;
        stored.ok_or_else(|| StoreError::Damaged(format!("the API server has stored no {key}")))
    }

    /// Removes an object, if it has this version; returns the answer.
    async fn remove_object(&self, key: &Key, expected: Option<&Version>) -> Result<Value, StoreError> {
        let (group, path) = self.object_path(key).await?;
        let mut options = json!({"apiVersion": "v1", "kind": "DeleteOptions"});
        if let Some(expected) = expected {
            options["preconditions"] = json!({"resourceVersion": expected.as_str()});
        }
        let request = request(Method::DELETE, &path, options.to_string().into_bytes());
        self.call(&of_object("delete", key, group), request).await
    }

    /// The path of an object, in the group of its kind.
    async fn object_path(&self, key: &Key) -> Result<(CalicoGroup, String), StoreError> {
        let group = self.group_of(key.kind).await?;
        let path = resources::object_path(group, key).ok_or(StoreError::KindAbsent(key.kind))?;
        Ok((group, path))
    }

    /// Why a write with this version was rejected: somebody else changed or deleted the object.
    async fn outdated(&self, key: &Key) -> StoreError {
        match self.get(key).await {
            Ok(Some(_)) => StoreError::Conflict(key.clone()),
            Ok(None) => StoreError::NotFound(key.clone()),
            Err(error) => error,
        }
    }

    /// The position of a deletion that has happened after this one: the API server returns it for few kinds only. If
    /// its history does not reach back, a later position.
    async fn position_of_deletion(&self, key: &Key, after: Position) -> Result<Position, StoreError> {
        let interest = Interest::in_object(key);
        if ipam::is_ipam(key.kind) {
            // Nobody waits for it.
            return Ok(self.list_page(&interest, None).await?.position);
        }
        let find = async {
            let mut watch = Source::watch(self, std::slice::from_ref(&interest), after).await?;
            while let Some(event) = watch.next().await {
                if let Event::Deleted { key: deleted, position } = event?
                    && deleted == *key
                {
                    return Ok(position);
                }
            }
            Err(StoreError::FellBehind)
        };
        let group = self.group_of(key.kind).await?;
        match self.in_time(&of_object("watch", key, group), find).await {
            Ok(position) => Ok(position),
            Err(_) => Ok(self.list_page(&interest, None).await?.position),
        }
    }

    /// The highest position of the objects of a kind; `None` if there is none, or the kind cannot be read.
    async fn newest(&self, kind: Kind) -> Result<Option<Position>, StoreError> {
        // Without the group, it is unknown whether there are objects.
        self.group_of(kind).await?;
        let mut newest = None;
        let take = |item: &Value| {
            newest = newest.max(Some(values::position(item.get("metadata"))?));
            Ok(())
        };
        match self.for_each(kind, trim::POSITIONS, take).await {
            Ok(()) => Ok(newest),
            Err(StoreError::KindAbsent(_) | StoreError::Forbidden(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes each object of a kind without its contents; some of them twice if the pages took too long.
    async fn for_each(
        &self,
        kind: Kind,
        keep: Keep,
        mut take: impl FnMut(&Value) -> Result<(), StoreError> + Send,
    ) -> Result<(), StoreError> {
        let group = self.group_of(kind).await?;
        let path = resources::path(group, kind, "").ok_or(StoreError::KindAbsent(kind))?;
        let operation = of_kind("list", kind, Position(0), group);
        let (mut next, mut limit) = (String::new(), MAX_METADATA_PAGE);
        loop {
            let query = format!("{path}?limit={limit}{next}");
            let mut request = request(Method::GET, &query, Vec::new());
            request.headers_mut().insert(ACCEPT, METADATA_ONLY);
            let page = match self.call_for(&operation, request, keep).await {
                Ok(page) => page,
                // The pages took too long: one page with everything.
                Err(StoreError::Compacted(_)) if limit > 0 => {
                    (next, limit) = (String::new(), 0);
                    continue;
                }
                Err(error) => return Err(error),
            };
            page["items"].as_array().into_iter().flatten().try_for_each(&mut take)?;
            match page["metadata"]["continue"].as_str().filter(|token| !token.is_empty()) {
                Some(token) => next = format!("&continue={}", resources::escape(token)),
                None => return Ok(()),
            }
        }
    }
}

/// Several writes at once. They start in their order, and none starts after one has failed.
#[derive(Default)]
struct Progress {
    started: AtomicUsize,
    failed: AtomicBool,
}

impl Progress {
    async fn execute(&self, store: &Kubernetes, write: Write) -> Result<(), StoreError> {
        if self.failed.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.started.fetch_add(1, Ordering::Relaxed);
        let result = crate::execute(store, write).await;
        self.failed.fetch_or(result.is_err(), Ordering::Relaxed);
        result.map(drop)
    }
}

/// A request for server-side apply.
fn apply_request(path: &str, value: &Value) -> http::Request<Vec<u8>> {
    let mut request = request(Method::PATCH, path, value.to_string().into_bytes());
    request.headers_mut().insert(CONTENT_TYPE, APPLY_PATCH);
    request
}

#[async_trait]
impl Store for Kubernetes {
    async fn get(&self, key: &Key) -> Result<Option<Stored>, StoreError> {
        if key.kind == Kind::Profile {
            return self.profile(key).await;
        }
        let (group, path) = self.object_path(key).await?;
        let operation = of_object("get", key, group);
        loop {
            let found = self.call(&operation, request(Method::GET, &path, Vec::new())).await;
            let decoded = match found {
                Ok(found) => values::decode(group, key.kind, found)?,
                Err(StoreError::NotFound(_)) => return Ok(None),
                Err(error) => return Err(error),
            };
            match decoded {
                Decoded::Without(of, position) if of == *key && ipam::is_ipam(key.kind) => {
                    match self.remove_object(key, Some(&Written::at(position.0).version)).await {
                        // Whoever may only read leaves the removal to others.
                        Ok(_) | Err(StoreError::NotFound(_) | StoreError::Forbidden(_)) => return Ok(None),
                        Err(StoreError::Conflict(_)) => {}
                        Err(error) => return Err(error),
                    }
                }
                decoded => return stored(key, decoded),
            }
        }
    }

    /// All pages are from one moment, which the token contains.
    async fn list_page(&self, interest: &Interest, after: Option<PageToken>) -> Result<Page, StoreError> {
        let kind = interest.kind;
        if kind == Kind::Profile {
            return self.profiles_page(interest, after).await;
        }
        let group = self.group_of(kind).await?;
        let collection = resources::collection(group, interest).ok_or(StoreError::KindAbsent(kind))?;
        let mut query = format!("{}?limit={MAX_PAGE}", collection.path);
        if let Some(fields) = collection.fields {
            query.push_str(&format!("&fieldSelector={fields}"));
        }
        if let Some(PageToken(token)) = after {
            query.push_str(&format!("&continue={}", resources::escape(&token)));
        }
        let operation = of_kind("list", kind, Position(0), group);
        let request = request(Method::GET, &query, Vec::new());
        let mut page = self.call_for(&operation, request, trim::of_list(kind)).await?;
        let metadata = page.get("metadata");
        let position = values::position(metadata)?;
        let token = metadata.and_then(|metadata| metadata["continue"].as_str());
        let next = token.filter(|token| !token.is_empty()).map(|token| PageToken(token.to_owned()));
        let mut items = Vec::new();
        if let Some(Value::Array(found)) = page.get_mut("items").map(Value::take) {
            for object in found {
                let decoded = values::decode(group, kind, object)?.object();
                items.extend(decoded.filter(|stored| interest.covers(&stored.key, &stored.value)));
            }
        }
        // The order of the API is not the one of keys.
        items.sort_by(|one, other| one.key.cmp(&other.key));
        Ok(Page { items, position, next })
    }

    /// Of blocks, the metadata is enough.
    async fn keys(&self, kind: Kind) -> Result<Vec<Key>, StoreError> {
        let mut keys = Some(BTreeSet::new());
        if kind == Kind::IpamBlock {
            let take = |item: &Value| {
                let cidr = item["metadata"]["name"].as_str().and_then(ipam::cidr_of_name);
                match (&mut keys, cidr) {
                    (Some(keys), Some(cidr)) => drop(keys.insert(Key::global(kind, cidr))),
                    _ => keys = None,
                }
                Ok(())
            };
            self.for_each(kind, trim::NAMES, take).await?;
            if let Some(keys) = keys {
                return Ok(keys.into_iter().collect());
            }
        }
        Ok(self.list(kind).await?.items.into_iter().map(|stored| stored.key).collect())
    }

    async fn create(&self, key: &Key, value: Value) -> Result<Stored, StoreError> {
        self.write("create", key, value, None).await
    }

    async fn update(&self, key: &Key, mut value: Value, expected: &Version) -> Result<Stored, StoreError> {
        if values::parse_position(expected.as_str()).is_err() {
            return Err(self.outdated(key).await);
        }
        // The API server creates a Service that does not exist, unless the update has a uid.
        if key.kind == Kind::Service
            && let Some(fields) = value.as_object_mut()
        {
            let current = self.get(key).await?.ok_or_else(|| StoreError::NotFound(key.clone()))?;
            values::set_uid(fields, &current.value);
        }
        match self.write("update", key, value, Some(expected)).await {
            // Another uid is a conflict, too.
            Err(StoreError::Conflict(_)) => Err(self.outdated(key).await),
            result => result,
        }
    }

    /// Sends the API server's own form of the object back: [`values::encode`] moves labels and other metadata of Calico's kinds.
    async fn set_finalizer(
        &self,
        key: &Key,
        finalizer: &str,
        present: bool,
        expected: &Version,
    ) -> Result<(), StoreError> {
        let (group, path) = self.object_path(key).await?;
        let get = request(Method::GET, &path, Vec::new());
        let mut object = self.call(&of_object("get", key, group), get).await?;
        if object["metadata"]["resourceVersion"] != expected.as_str() {
            return Err(StoreError::Conflict(key.clone()));
        }
        support::set_finalizer(&mut object, finalizer, present);
        let put = request(Method::PUT, &path, object.to_string().into_bytes());
        match self.call(&of_object("update", key, group), put).await {
            Err(StoreError::Conflict(_)) => Err(self.outdated(key).await),
            result => result.map(drop),
        }
    }

    /// A pod is deleted by its node: the position is the one at which its deletion began.
    async fn delete(&self, key: &Key, expected: Option<&Version>) -> Result<Position, StoreError> {
        refuse_derived(key)?;
        if expected.is_some_and(|expected| values::parse_position(expected.as_str()).is_err()) {
            return Err(self.outdated(key).await);
        }
        // The object's own version may be too old for a watch.
        let Page { items, position: before, .. } = self.list_page(&Interest::in_object(key), None).await?;
        if items.is_empty() {
            return Err(StoreError::NotFound(key.clone()));
        }
        let deleted = self.remove_object(key, expected).await?;
        if deleted["kind"] == "Status" {
            return self.position_of_deletion(key, before).await;
        }
        values::position(deleted.get("metadata"))
    }

    /// Objects of Kubernetes' own kinds are applied by the API server, as by kubectl: it keeps what others have added.
    async fn apply(&self, object: &Object) -> Result<Applied, StoreError> {
        let key = &object.key;
        if !resources::is_of_kubernetes(key.kind) {
            return crate::apply::apply(self, object).await;
        }
        let (group, path) = self.object_path(key).await?;
        let before = self.get(key).await?;
        if let Some(before) = &before {
            crate::check_preconditions(object, before)?;
        }
        // The API server compares it, too: somebody may write between the two requests.
        let expected = object.preconditions.resource_version.as_ref().and(before.as_ref());
        let expected = expected.map(|stored| &stored.version);
        let value = values::encode(group, key, object.value.clone(), expected)?;
        let before = before.map(|stored| stored.position);
        let path = format!("{path}?fieldManager=tortie&force=true");
        let applied = self.call(&of_object("apply", key, group), apply_request(&path, &value)).await?;
        let after = values::position(applied.get("metadata"))?;
        Ok(match before {
            None => Applied::Created(after),
            Some(before) if before == after => Applied::Unchanged(after),
            Some(_) => Applied::Configured(after),
        })
    }

    async fn write_before(&self, first: Vec<Write>, last: Write) -> Result<Written, Unfinished> {
        let progress = Progress::default();
        let writes = first.into_iter().map(|write| progress.execute(self, write));
        // Requests that were sent are waited for.
        let results: Vec<_> = stream::iter(writes).buffer_unordered(WRITES_AT_ONCE).collect().await;
        let tried = progress.started.into_inner();
        let written = match results.into_iter().find_map(Result::err) {
            Some(error) => Err(error),
            None => crate::execute(self, last).await,
        };
        written.map_err(|error| Unfinished { tried, error })
    }

    fn follow(&self, interests: Vec<Interest>) -> Follow {
        let (profiles, others): (Vec<_>, Vec<_>) =
            interests.into_iter().partition(|interest| interest.kind == Kind::Profile);
        let profiles = profiles.into_iter().map(|interest| self.follow_profiles(interest));
        let followers = profiles.chain([follow(&Arc::new(self.clone()), others)]);
        futures::stream::select_all(followers).boxed()
    }

    /// The highest position of the objects of each kind. (The position of a list would be reached only with the next
    /// bookmark, up to a minute later.)
    async fn barrier(&self, kinds: &[Kind]) -> Result<Positions, StoreError> {
        let newest = kinds.iter().map(async |kind| Ok((*kind, self.newest(*kind).await?)));
        let newest = futures::future::try_join_all(newest).await?;
        Ok(newest.into_iter().filter_map(|(kind, newest)| Some((kind, newest?))).collect())
    }
}

#[async_trait]
impl Source for Kubernetes {
    /// A watch for each kind, as the API has them.
    fn groups(&self, interests: Vec<Interest>) -> Vec<Vec<Interest>> {
        interests.into_iter().map(|interest| vec![interest]).collect()
    }

    async fn watch(&self, interests: &[Interest], after: Position) -> Result<Watch, StoreError> {
        let [interest] = interests else {
            return Err(StoreError::Unavailable("the Kubernetes API has one watch for each kind".to_owned()));
        };
        let group = self.group_of(interest.kind).await?;
        let collection = resources::collection(group, interest);
        let collection = collection.ok_or(StoreError::KindAbsent(interest.kind))?;
        let mut path = format!("{}?", collection.path);
        if let Some(fields) = collection.fields {
            path.push_str(&format!("fieldSelector={fields}&"));
        }
        self.open_watch(of_kind("watch", interest.kind, after, group), path).await
    }
}

/// The object of an answer about this key; `None` if the answer's object gives none with this key.
fn stored(key: &Key, decoded: Decoded) -> Result<Option<Stored>, StoreError> {
    match decoded {
        Decoded::Object(stored) if stored.key == *key => Ok(Some(stored)),
        _ if resources::is_derived(key.kind) => Ok(None),
        other => {
            let found = other.object();
            let found = found.map_or("an object without a key".to_owned(), |other| other.key.to_string());
            Err(StoreError::Damaged(format!("{key} is requested, and {found} has its name in the API")))
        }
    }
}

fn refuse_derived(key: &Key) -> Result<(), StoreError> {
    let source = match key.kind {
        Kind::WorkloadEndpoint => "its Pod",
        Kind::Profile => "its Namespace or ServiceAccount",
        _ => return Ok(()),
    };
    let problem =
        format!("with the Kubernetes API, a {} is derived from {source}: write that", key.kind.name());
    Err(StoreError::Invalid { key: key.clone(), problem })
}

fn of_object(verb: &'static str, key: &Key, group: CalicoGroup) -> Operation {
    Operation { verb, kind: key.kind, key: Some(key.clone()), after: Position(0), group }
}

fn of_kind(verb: &'static str, kind: Kind, after: Position, group: CalicoGroup) -> Operation {
    Operation { verb, kind, key: None, after, group }
}
