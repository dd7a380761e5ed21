//! The Secrets with passwords of BGP peers. Only those that a resource names are read, and followed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::StreamExt;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tortie_api::calico::SecretKey;
use tortie_bgp::calico::NoSecret;
use tortie_store::{SecretState, Secrets};

/// How often reading a Secret may fail until the speaker begins without it: about half a minute, since attempts become rarer.
const AWAITED_ATTEMPTS: u32 = 8;

/// The maximum number of changes that wait.
const WAITING: usize = 16;

/// An answer of the API server about the Secret with this name.
type SecretAnswer = (String, SecretState);

/// The Secrets that are followed.
pub(super) struct Passwords {
    source: Option<Arc<dyn Secrets>>,
    /// By name.
    followed: BTreeMap<String, Followed>,
    changes: (mpsc::Sender<SecretAnswer>, mpsc::Receiver<SecretAnswer>),
}

struct Followed {
    /// The last answer; `None` before the first one.
    known: Option<SecretState>,
    /// Why there is no answer.
    unavailable: Option<String>,
    /// The attempts in a row without an answer.
    failures: u32,
    task: AbortHandle,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Passwords {
    pub(super) fn new(source: Option<Arc<dyn Secrets>>) -> Self {
        Self { source, followed: BTreeMap::new(), changes: mpsc::channel(WAITING) }
    }

    /// Follows these Secrets, and no others.
    pub(super) fn follow(&mut self, names: BTreeSet<String>) {
        let Some(source) = &self.source else { return };
        self.followed.retain(|name, _| names.contains(name));
        for name in names {
            let changes = self.changes.0.clone();
            self.followed.entry(name.clone()).or_insert_with(|| {
                let mut states = source.follow_secret(&name);
                let task = tokio::spawn(async move {
                    while let Some(state) = states.next().await {
                        if changes.send((name.clone(), state)).await.is_err() {
                            return;
                        }
                    }
                });
                Followed { known: None, unavailable: None, failures: 0, task: task.abort_handle() }
            });
        }
    }

    /// The next answer of the API server. It never ends.
    pub(super) async fn next(&mut self) -> SecretAnswer {
        match self.changes.1.recv().await {
            Some(change) => change,
            // A sender is in `self`.
            None => std::future::pending().await,
        }
    }

    /// Takes an answer. Returns whether the configuration of the speaker may differ. While the API server is away, what is
    /// known counts; so does a password that may not be read again, because that says nothing about the password.
    pub(super) fn take(&mut self, (name, state): SecretAnswer) -> bool {
        let Some(followed) = self.followed.get_mut(&name) else { return false };
        let has_password = matches!(followed.known, Some(SecretState::Present(_)));
        let state = match state {
            SecretState::Forbidden(problem) if has_password => SecretState::Unavailable(problem),
            state => state,
        };
        if let SecretState::Unavailable(problem) = state {
            followed.unavailable = Some(problem);
            followed.failures += 1;
            return followed.known.is_none() && followed.failures == AWAITED_ATTEMPTS;
        }
        followed.unavailable = None;
        followed.failures = 0;
        let differs = followed.known.as_ref() != Some(&state);
        followed.known = Some(state);
        differs
    }

    /// Whether a Secret has not been read yet. The speaker waits for it: a session without its peers' routes would cost the
    /// kernel the routes of an earlier process. It does not wait for one that cannot be read again and again: other peers need no
    /// password, or another one.
    pub(super) fn are_awaited(&self) -> bool {
        let is_awaited =
            |followed: &Followed| followed.known.is_none() && followed.failures < AWAITED_ATTEMPTS;
        self.followed.values().any(is_awaited)
    }

    /// Why Secrets that are needed are unknown.
    pub(super) fn problems(&self) -> Vec<String> {
        let problems = self.followed.iter().filter_map(|(name, followed)| {
            let problem = followed.unavailable.as_ref()?;
            let consequence = match followed.known {
                Some(_) => "the last known password counts",
                None if followed.failures < AWAITED_ATTEMPTS => "the BGP speaker waits for it",
                None => "its peers have no session",
            };
            Some(format!("Secret {} cannot be read: {problem}; {consequence}", self.full_name(name)))
        });
        problems.collect()
    }

    /// The value of a key.
    pub(super) fn get(&self, SecretKey { name, key, .. }: &SecretKey) -> Result<Vec<u8>, NoSecret> {
        if self.source.is_none() {
            return Err(NoSecret::Unreadable(
                "agents read Secrets only if the Kubernetes API is the datastore; remove the password, or use that datastore"
                    .to_owned(),
            ));
        }
        let full_name = self.full_name(name);
        match self.followed.get(name).and_then(|followed| followed.known.as_ref()) {
            Some(SecretState::Present(data)) => match data.0.get(key) {
                Some(value) => Ok(value.clone()),
                None => Err(NoSecret::Absent(format!("the Secret {full_name} has no key {key}; add it"))),
            },
            Some(SecretState::Absent) => {
                Err(NoSecret::Absent(format!("there is no Secret {full_name}; create it with the key {key}")))
            }
            Some(SecretState::Forbidden(problem)) => {
                Err(NoSecret::Unreadable(format!("the agent may not read the Secret {full_name}: {problem}")))
            }
            Some(SecretState::Unavailable(_)) | None => {
                Err(NoSecret::Unreadable(format!("the Secret {full_name} has not been read yet")))
            }
        }
    }

    fn full_name(&self, name: &str) -> String {
        let namespace = self.source.as_ref().map_or("", |source| source.namespace());
        format!("{namespace}/{name}")
    }
}

#[cfg(test)]
mod tests {
    use futures::stream::BoxStream;
    use tortie_store::SecretData;

    use super::*;

    /// A source whose answers the test gives itself.
    struct Silent;

    impl Secrets for Silent {
        fn namespace(&self) -> &str {
            "n"
        }

        fn follow_secret(&self, _: &str) -> BoxStream<'static, SecretState> {
            futures::stream::pending().boxed()
        }
    }

    fn key() -> SecretKey {
        SecretKey { name: "bgp".to_owned(), key: "password".to_owned(), ..SecretKey::default() }
    }

    fn present(value: &str) -> SecretState {
        SecretState::Present(SecretData([("password".to_owned(), value.as_bytes().to_vec())].into()))
    }

    #[tokio::test]
    async fn what_is_known_of_a_secret_decides_about_its_password() {
        let mut passwords = Passwords::new(Some(Arc::new(Silent)));
        assert!(!passwords.are_awaited());
        passwords.follow(["bgp".to_owned()].into());
        assert!(passwords.are_awaited());
        let absent = |text: &str| Err(NoSecret::Absent(text.to_owned()));
        for (state, differs, expected) in [
            (SecretState::Unavailable("away".to_owned()), false, None),
            (
                SecretState::Absent,
                true,
                Some(absent("there is no Secret n/bgp; create it with the key password")),
            ),
            (
                SecretState::Absent,
                false,
                Some(absent("there is no Secret n/bgp; create it with the key password")),
            ),
            (
                SecretState::Present(SecretData::default()),
                true,
                Some(absent("the Secret n/bgp has no key password; add it")),
            ),
            (present("one"), true, Some(Ok(b"one".to_vec()))),
            (SecretState::Unavailable("away".to_owned()), false, Some(Ok(b"one".to_vec()))),
            (present("two"), true, Some(Ok(b"two".to_vec()))),
            // A permission that is taken away, or a token that has ended, says nothing about the password.
            (SecretState::Forbidden("no".to_owned()), false, Some(Ok(b"two".to_vec()))),
            (
                SecretState::Absent,
                true,
                Some(absent("there is no Secret n/bgp; create it with the key password")),
            ),
        ] {
            assert_eq!(passwords.take(("bgp".to_owned(), state.clone())), differs, "{state:?}");
            assert_eq!(passwords.are_awaited(), expected.is_none(), "{state:?}");
            let is_unread = matches!(state, SecretState::Unavailable(_) | SecretState::Forbidden(_));
            assert_eq!(passwords.problems().is_empty(), !is_unread);
            if let Some(expected) = expected {
                assert_eq!(passwords.get(&key()), expected, "{state:?}");
            }
        }
        // One that cannot be read for long keeps no other session away.
        let mut unread = Passwords::new(Some(Arc::new(Silent)));
        unread.follow(["bgp".to_owned()].into());
        for attempt in 1..=AWAITED_ATTEMPTS + 1 {
            let differs = unread.take(("bgp".to_owned(), SecretState::Unavailable("broken".to_owned())));
            assert_eq!(differs, attempt == AWAITED_ATTEMPTS, "{attempt}");
            assert_eq!(unread.are_awaited(), attempt < AWAITED_ATTEMPTS, "{attempt}");
        }
        assert!(matches!(unread.get(&key()), Err(NoSecret::Unreadable(_))));
        assert!(unread.problems()[0].contains("its peers have no session"), "{:?}", unread.problems());

        passwords.take(("bgp".to_owned(), SecretState::Forbidden("no".to_owned())));
        assert!(
            matches!(passwords.get(&key()), Err(NoSecret::Unreadable(_))),
            "an optional one is unknown, too"
        );
        passwords.follow(BTreeSet::new());
        assert!(!passwords.take(("bgp".to_owned(), present("late"))), "nobody follows it any more");
        assert!(matches!(Passwords::new(None).get(&key()), Err(NoSecret::Unreadable(_))));
    }
}
