"""`thresher bench retrieval`: indexes beside torch, numpy and FAISS, and a server under load."""
