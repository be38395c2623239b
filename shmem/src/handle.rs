//! A PE's one-sided layer, borrowed or owned.

use std::rc::Rc;
use std::sync::Arc;

use super::{Shmem, Transport};

/// What holds a [`Shmem`]: the value itself, a reference, a box, a counted pointer. Who takes one of these leaves it to the
/// caller whether it owns the PE's symmetric memory or shares it.
pub trait AsShmem {
    /// The transport under it.
    type Transport: Transport;

    /// The one-sided layer of this PE.
    fn as_shmem(&self) -> &Shmem<Self::Transport>;
}

impl<T: Transport> AsShmem for Shmem<T> {
    type Transport = T;

    fn as_shmem(&self) -> &Shmem<T> {
        self
    }
}

macro_rules! pointers {
    ($($pointer:ty),*) => {$(
        impl<S: AsShmem + ?Sized> AsShmem for $pointer {
            type Transport = S::Transport;

            fn as_shmem(&self) -> &Shmem<S::Transport> {
                (**self).as_shmem()
            }
        }
    )*};
}

pointers!(&S, Box<S>, Rc<S>, Arc<S>);
