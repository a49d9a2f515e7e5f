"""Drafting, trees and verification: pure algorithms on tensors.

Words: a *law* is a probability distribution over the vocabulary; p is the target model's, q the
draft model's, after temperature and filters. A drafted token is *accepted* if verification emits
it. The last token of a step is drawn by verification: it is a *recovered* token if a drafted token
was rejected before it (its law is the *residual*), and a
*bonus* token if a whole chain was accepted (its law is p). A step emits its accepted tokens and one
recovered or bonus token.

Not for: models, K/V storage or scheduling; nothing here depends on where a law comes from.
"""
