//! Empty: this package only enables features of dependencies; see its manifest.
